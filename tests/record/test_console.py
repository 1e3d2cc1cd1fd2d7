"""Console output of a run: lines in a pipe, a view on a terminal, the final summary."""

import io
import logging
from types import SimpleNamespace

import pytest

from sparring.contract import EnvSpec
from sparring.evaluation.exploration import ExplorationEvaluation, _Exploration
from sparring.evaluation.play import Evaluation, _Score, wilson
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.phases.phase import Progress
from sparring.record import log as view
from sparring.record.log import CELLS, Console, _Curve, _sparkline, _View, clock
from sparring.runs.run import _RunConsole
from sparring.runs.summary import _reached as reached

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_size(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(view, "EVERY", 0.0)


def shown(fraction: float = 0.5, width: int = 100, **metrics) -> list[str]:
    """The lines of a view."""
    shown_view = _View(Terminal(), "finetune  run")
    shown_view.console.width = width
    shown_view.show(fraction, "500 steps  10 steps/s  0:05 left", metrics, "")
    lines = [text.plain.rstrip() for text in shown_view.lines(fraction, "500 steps  10 steps/s  0:05 left", "")]
    shown_view.close()
    return lines


# ---- pipe


def test_pipe_gets_plain_sparse_lines():
    pipe = io.StringIO()
    lines = Console(pipe, pipe_seconds=3600)
    with lines:
        for done in (0.25, 0.5, 1.0):
            lines.progress(done, int(done * 1000), "reward 1.00", metrics={"success_rate": 0.5})
    # the first and the last; the second came too soon after the first
    assert [line.split()[0] for line in pipe.getvalue().splitlines()] == ["25%", "100%"]
    assert pipe.getvalue().splitlines()[0] == " 25%  250 steps  starting  ? left  reward 1.00"
    assert "steps/s" in pipe.getvalue() and "\x1b" not in pipe.getvalue() and "\r" not in pipe.getvalue()


def test_tokenizer_training_is_shown_instead_of_an_accuracy(monkeypatch):
    monkeypatch.setattr("sparring.runs.run.Console.progress", lambda self, *arguments: calls.append(arguments))
    calls, progress = [], Progress(3, 0, 0)
    phase = SimpleNamespace(progress=progress, preparing="learning its tokens 40 %", accuracy="fresh_acc")
    run = SimpleNamespace(phase=phase, fraction=0.25, log=SimpleNamespace(update=lambda *_: None))
    console, tokens = _RunConsole(), {"loss": 1.5, "collect_seconds": 1.0}
    console.after_update(run, tokens)
    phase.preparing, metrics = None, tokens | {"fresh_acc": 0.5}
    console.after_update(run, metrics)
    assert calls == [
        (0.25, 3, "loss 1.500", "updates", tokens, "learning its tokens 40 %"),
        (0.25, 3, "loss 1.500  accuracy 50%", "updates", metrics, None),
    ]
    monkeypatch.undo()
    pipe = io.StringIO()
    Console(pipe).progress(0.25, 3, "loss 1.500", "updates", {}, "learning its tokens 40 %")
    assert pipe.getvalue() == " 25%  3 updates  starting  ? left  learning its tokens 40 %  loss 1.500\n"


def test_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    Console(terminal).progress(0.5, 5, "reward 1.00")
    assert terminal.getvalue() == " 50%  5 steps  starting  ? left  reward 1.00\n"


def test_quiet_prints_nothing():
    terminal = Terminal()
    with Console(terminal, quiet=True) as console:
        console.progress(0.5, 5, "", metrics={"loss": 1.0})
    assert terminal.getvalue() == ""


# ---- terminal


def test_view_shows_the_metrics_of_the_run():
    assert shown(success_rate=0.87, episode_reward=12.34, policy_loss=-0.0131, approx_kl=0.0089, loss=0.2) == [
        "finetune  run",
        "████████████████████░░░░░░░░░░░░░░░░░░░░  50%  500 steps  10 steps/s  0:05 left",
        "success   ▇  87%",
        "reward    ▁  12.3",
        "losses    policy -0.0131  KL 0.0089",
    ]
    # of a world model, and of imitation
    assert shown(fresh_acc=0.5, loss=0.2)[2:] == ["accuracy  ▅  50%"]
    assert shown(loss=0.25)[2:] == ["loss      ▁  0.25"]
    # rewards are shown unnormalised
    explorer = shown(contact_share=0.25, **{"reward/prediction_error": 1.5, "reward/prediction_error_normalized": 0.1})
    assert explorer[2:] == ["contact   ▃  25%", "rewards   prediction_error 1.5"]
    # in async mode
    assert shown(staleness=1.0, queue_depth=0.5, actor_idle=0.03)[2:] == [
        "async     staleness 1  queue 0.5  robots idle 3%"
    ]


def test_view_fits_narrow_terminals():
    terminal = Terminal()
    narrow = _View(terminal, "finetune  outputs/a_folder_with_a_long_name_somewhere")
    narrow.console.width = 30
    narrow.show(
        0.5, "123,456 steps  1,000 steps/s  0:05 left", {"policy_loss": 0.1, "value_loss": 0.2, "entropy": 1.0}, ""
    )
    narrow.close()
    drawn = terminal.getvalue().split(HIDE_CURSOR)[-1].split(SHOW_CURSOR)[0]
    lines = [line for line in drawn.splitlines() if line and not line.startswith("\x1b")]
    assert lines and all(len(line.rstrip("\r")) <= 30 for line in lines) and lines[0].endswith("…")


def test_view_keeps_the_last_value_of_a_metric():
    shown_view = _View(Terminal(), "")
    shown_view.show(0.1, "", {"success_rate": 0.5}, "")
    shown_view.show(0.2, "", {"loss": 1.0}, "")
    assert "success   ▅  50%" in [text.plain for text in shown_view.lines(0.2, "", "")]
    shown_view.close()


def test_view_without_unicode_uses_ascii():
    class Old(Terminal):
        encoding = "ascii"

    old = _View(Old(), "")
    old.show(0.5, "", {"success_rate": 0.99}, "")
    assert [text.plain for text in old.lines(0.5, "", "")][:2] == ["#" * 20 + "." * 20 + "  50%  ", "success   #  99%"]
    old.close()


def test_view_is_drawn_at_limited_rate(monkeypatch):
    monkeypatch.setattr(view, "EVERY", 3600.0)
    terminal = Terminal()
    with Console(terminal) as console:
        console.progress(0.0, 0, "", metrics={"loss": 1.0})
        before = len(terminal.getvalue())
        for step in range(1, 50):
            console.progress(step / 100, step, "", metrics={"loss": 1.0})
        assert len(terminal.getvalue()) == before
        # the end is shown, and the curve has all values
        console.progress(1.0, 100, "", metrics={"loss": 1.0})
        assert len(terminal.getvalue()) > before and console.view.curves["loss"].each == 2


def test_closed_view_leaves_one_line():
    terminal = Terminal()
    with pytest.raises(RuntimeError), Console(terminal, title="run") as console:
        console.progress(0.5, 5, "reward 1.00", metrics={"episode_reward": 1.0})
        assert HIDE_CURSOR in terminal.getvalue()
        raise RuntimeError
    after = terminal.getvalue()[terminal.getvalue().rindex(SHOW_CURSOR) :]
    assert after.endswith(" 50%  5 steps  starting  ? left  reward 1.00\n") and "█" not in after
    # the line is printed once
    console.end()
    assert terminal.getvalue().count("reward 1.00") == 1
    # the view can be opened again
    console.progress(0.6, 6, "reward 2.00", metrics={"episode_reward": 2.0})
    console.end()
    assert terminal.getvalue().endswith("reward 2.00\n")


def test_log_messages_are_printed_above_the_view(monkeypatch):
    terminal, logger = Terminal(), logging.getLogger("sparring")
    handler = logging.StreamHandler(terminal)
    # handlers of earlier runs write to closed streams
    monkeypatch.setattr(logger, "handlers", [handler])
    with Console(terminal) as console:
        console.progress(0.5, 5, "", metrics={"success_rate": 1.0})
        start = len(terminal.getvalue())
        # wider than the terminal, with text that looks like markup
        logger.warning("to look at: [red]%s.mp4", "x" * 150)
        written = terminal.getvalue()[start:]
        assert f"to look at: [red]{'x' * 150}.mp4" in written
        # the view follows on a new line
        assert written.index("success") > written.index(".mp4\n")
    logger.warning("after")
    assert terminal.getvalue().endswith("after\n") and handler.stream is terminal


# ---- curves


def test_curve_covers_the_complete_run():
    curve = _Curve()
    for value in range(1000):
        curve.add(float(value))
    assert curve.each == 32 and len(curve.cells) == 1000 // 32 < CELLS
    # means of 32 values
    assert curve.cells[:2] == [15.5, 47.5]


def test_nan_is_printed_but_not_in_the_curve():
    assert shown(loss=float("nan"))[2:] == ["loss        nan"]
    curve = _Curve()
    for value in (1.0, float("inf"), 2.0):
        curve.add(value)
    assert curve.cells == [1.0, 2.0]


def test_sparklines():
    assert _sparkline([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert _sparkline([0.0, 0.5, 1.0], 40, (0.0, 1.0)) == "▁▅█"
    assert _sparkline([3, 3], 40) == "▁▁" and _sparkline([], 40) == ""
    assert len(_sparkline(list(range(39)), 10)) == 10


def test_clock():
    assert [clock(s) for s in (5, 65, 3700, float("inf"))] == ["0:05", "1:05", "1:01:40", "?"]


# ---- the end


def test_summary_of_an_evaluation():
    def score(successes: int, reward: float) -> dict[str, _Score]:
        return {"reach_d0": _Score(wilson(successes, 100), reward, 0.0, 50.0)}

    evaluation = Evaluation(100, 0, {"policy": score(95, 12.0), "random": score(2, 3.0)}, [], EnvSpec({}, 1))
    assert reached(evaluation) == ["success 95.0% (95 % 88.8% to 97.8%); random actions 2.0%"]
    evaluation.spec = EnvSpec({}, 1, reports_success=False)
    assert reached(evaluation) == ["reward 12.00; random actions 3.00"]
    del evaluation.scores["random"]
    assert reached(evaluation) == ["reward 12.00"]
    levels = {"prediction": 22.14, "copy": 24.63, "ceiling": 23.8}
    cameras = {"head": {"changed_mse_ratio": 0.25, "psnr": levels}, "wrist": {"changed_mse_ratio": None}}
    text = "head: squared error on changed pixels 0.250 (copying the last frame: 1)"
    assert reached(WorldModelEvaluation(3, 0, {"cameras": cameras})) == [text + "; PSNR 22.1 dB, copying 24.6 dB"]
    levels["copy"] = None
    assert reached(WorldModelEvaluation(3, 0, {"cameras": cameras})) == [text]
    found = {
        who: _Exploration(10, touch, 1, 1.0, None, 0.0) for who, touch in (("policy", 0.5), ("a", 0.1), ("b", 0.2))
    }
    assert reached(ExplorationEvaluation(3, 0, found)) == [
        "touches an object in 50.0% of its decisions; random actions in at most 20.0%"
    ]
