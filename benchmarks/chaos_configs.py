"""Does every config or override end in a valid config or a one-line error? Seeded fuzzing that knows the schema.

Real keys get values of wrong types and extremes; files are broken, nested, aliased, tagged, huge, or not files. An
accepted config is printed and read again, and must be equal. `here`: in this process, at most 2 CPU seconds each and at
most 500 MB growth of the peak memory. `commands`: the same kinds of cases through `sparring config`. Bad verdicts:
`traceback`, `slow`, `large`, `differs when read again`, `other exit code`, `hang`.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import yaml

from sparring.config.inherit import PHASE_DEFAULTS
from sparring.config.schema import SCHEMA, configure
from sparring.config.text import Setting, parse_overrides, read_settings
from sparring.errors import UserError

PHASES = ["finetune", "imitate", *PHASE_DEFAULTS]
SLOW_S, LARGE_MB = 2.0, 500
_NESTED = [f"{'[' * deep}{']' * deep}" for deep in (2, 30, 45, 500, 5000)]
_LAUGHS = "&a [x, x], &b [*a, *a], &c [*b, *b], &d [*c, *c], &e [*d, *d], &f [*e, *e], &g [*f, *f], &h [*g, *g]"
_USUAL = ["0", "1", "2", "8", "0.5", "true", "false", "null", "[1]", "[a]", "x", "{}"]
_TEXTS = """-1 0 1 -0 0.0 1e308 -1e308 1e309 1e-320 .nan .inf -.inf nan inf true false null ~ '' [] {} [[]] [null]
[true] [-1] [0] [.nan] 2147483647 2147483648 9223372036854775808 -9223372036854775809 0x10 1_000 1e3 1.5 12:30
2024-01-02 yes on
../../etc/passwd /etc/passwd /dev/null /dev/zero /proc/self/mem . .. ~root $(true) *a %TAG [ ] { } : | > @ ` ' "
# - -- = ppo grpo tabletop gym:CartPole-v1 gym: gym:Nope-v9 :: a: :b
1.0 ٣ ½ üñí 日本語 🤖 \u202e cuda:99999999999 cuda:٣ cuda:-1
all flow vla pi0 native_vla token original async fpo flow_noise"""
VALUES = _TEXTS.split() + [
    *(
        "",
        "{a: 1}",
        "{1: 2}",
        "{null: 1}",
        "{[1]: 2}",
        "{a: {b: {c: 1}}}",
        "[reach_d0, reach_d0]",
        "- a",
        "? a",
        "a: b: c",
    ),
    *(
        "!!python/name:os.system",
        "!!binary YQ==",
        "!!set {a}",
        "!!int abc",
        "!!float x",
        "!!timestamp 2001",
        "!!null x",
    ),
    *("!!bool x", "!!int ''", "!!omap [a: 1]", "!!map [1]", "!!seq {a: 1}", "!!str [1]", "!x y", "! 1", "!!float 3"),
    *("&a [*a]", "&a {b: *a}", "[&a 1, *a, *a]", f"[{_LAUGHS}]", f"[{', '.join(['1'] * 2000)}]", "a" * 20_000),
    *(
        "9" * 30,
        "9" * 400,
        "9" * 5000,
        "1" + "0" * 308,
        "[1e308]",
        "[1,2,3,4,5,6,7,8,9]",
        '"\\0"',
        '"\\ud800"',
        "\x00",
        "\t",
    ),
    *(f"[{', '.join(['head'] * 2000)}]", f"{{{', '.join(f'k{i}: 1' for i in range(3000))}}}", "a\nb", "\x1b[31mred"),
    *_NESTED,
]
_LEAVES = [1, -1, 0.5, None, True, "x", [], [1], {}, {"a": 1}, "é", 1e308, -5, float("inf"), "1e-3", 10**18, [1] * 2000]
_SPLICES = [
    *(b"\t", b"  ", b":", b"{", b"[", b"&a ", b"*a", b"\xff", b"\x00", b"!!x ", b"---\n", b"...\n", b"? ", b"- "),
    *(b"<<: ", b"\xef\xbb\xbf", b"%YAML 9\n", b"// c\n", b'"', b"\\", b"!!timestamp ", b"\xf0\x9f\xa4\x96", b"\r"),
]


CASES = ("here", "commands")
BAD = ("traceback", "slow", "large", "differs when read again", "other exit code", "hang")


class Cases:
    """`next()` returns (phase, words of the command line, config file) of another random case."""

    def __init__(self, seed: int, work: Path):
        self.rng, self.work = random.Random(seed), work
        os.mkfifo(work / "fifo")
        self.keys = [*SCHEMA.keys(SCHEMA.classes()), *(f"{name}.{leaf}" for name, leaf in _own_keys())]
        self.spelled = [*self.keys, *(alias.rstrip(".") for alias in SCHEMA.aliases), *SCHEMA.root.model_fields]

    def next(self) -> tuple[str, list[str], Path | None]:
        rng, how = self.rng, self.rng.random()
        phase = rng.choice([*PHASES] * 5 + ["", "all", "nope"])
        if how < 0.45:
            values = _USUAL if rng.random() < 0.4 else VALUES
            return phase, [f"{rng.choice(self.keys)}={rng.choice(values)}"], None
        if how < 0.65:
            words = [f"{rng.choice(self.spelled)}={rng.choice(VALUES)}" for _ in range(rng.randrange(1, 6))]
            return phase, [rng.choice(["", "--"]) + word for word in words], None
        if how < 0.75:
            return phase, [self._misspelt() + "=" + rng.choice(VALUES)], None
        if how < 0.8:
            return phase, [rng.choice(VALUES) for _ in range(rng.randrange(1, 4))], None
        return phase, [], self._broken_file() if how < 0.97 else self._odd_file()

    def _misspelt(self) -> str:
        key = list(self.rng.choice(self.spelled))
        for _ in range(self.rng.randrange(1, 3)):
            key[self.rng.randrange(len(key))] = self.rng.choice("abz._-[]{}: \u0301é0")
        return "".join(key)

    def _broken_file(self) -> Path:
        rng, tree = self.rng, {}
        for _ in range(rng.randrange(1, 8)):
            *sections, leaf = rng.choice(self.spelled).split(".")
            node = tree
            for section in sections:
                inner = node.setdefault(section, {})
                node = inner if isinstance(inner, dict) else {}
            node[leaf] = rng.choice(_LEAVES)
        kind = rng.choice(["yaml", "json", "yml", "txt"])
        text = json.dumps(tree, indent=rng.choice([None, 1])) if kind == "json" else yaml.safe_dump(tree)
        data = bytearray(text.encode())
        for _ in range(rng.choice([0, 1, 1, 2, 10])):
            at, how = rng.randrange(len(data) + 1), rng.randrange(4)
            if how == 0 and data:
                data[at % len(data)] = rng.randrange(256)
            elif how == 1:
                data[at:at] = rng.choice(_SPLICES)
            elif how == 2:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data += data[: rng.randrange(1, 40)]
        file = self.work / f"broken.{kind}"
        file.write_bytes(data)
        return file

    def _odd_file(self) -> Path:
        """A file of a size, depth or kind that no config has."""
        rng, file = self.rng, self.work / f"odd.{self.rng.choice(['yaml', 'json'])}"
        odd = rng.randrange(9)
        if odd < 3:
            return [self.work, Path("/dev/zero"), self.work / "fifo"][odd]
        deep, wide = 10 ** rng.randrange(2, 6), 10 ** rng.randrange(2, 5)
        laughs = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(9))
        texts = ["seed: " + "[" * deep, '{"a":' * deep, laughs, "\n".join(f"k{i}: {i}" for i in range(wide))]
        texts += ["seed: '" + "x" * wide * 30, '{"a": "' + '\\"' * wide * 9]
        file.write_text(texts[odd - 3])
        return file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", type=int, default=10_000, help="number of cases of `here` (default: 10000)")
    parser.add_argument("--commands", type=int, default=100, help="number of cases of `commands` (default: 100)")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    work = work / name
    work.mkdir()
    found = fuzz(args.configs, args.seed, work) if name == "here" else by_command(args.commands, args.seed + 1, work)
    for trial in found:
        yield trial | {"of": args.configs if name == "here" else args.commands}


def summary(trials: list[dict]) -> dict:
    return {"most": {name: max(trial[name] for trial in trials) for name in ("seconds", "mb_grown", "characters")}}


def fuzz(count: int, seed: int, work: Path) -> Iterator[dict]:
    # `pretrained` imports torch: its 250 MB must not count as growth
    import sparring.runs.checkpoint  # noqa: F401

    cases = Cases(seed, work)
    for number in range(count):
        phase, words, file = cases.next()
        before, began = _peak_mb(), time.process_time()
        verdict, message = _try(phase, words, file, number % 2 == 0, work / "again.yaml")
        seconds, grown = time.process_time() - began, _peak_mb() - before
        if verdict in ("accepted", "refused"):
            verdict = "slow" if seconds > SLOW_S else "large" if grown > LARGE_MB else verdict
        trial = {"verdict": verdict, "seconds": round(seconds, 3), "mb_grown": round(grown, 1)}
        trial |= {"characters": len(message)}
        if verdict in BAD:
            trial |= {"case": f"{number}: {phase} {' '.join(words)[:200]!r} {file or ''}", "output": message[-500:]}
        yield trial


def _try(phase: str, words: list[str], file: Path | None, to_run: bool, again: Path) -> tuple[str, str]:
    """(verdict, message)."""
    try:
        settings = (read_settings(file) if file else []) + parse_overrides(words)
        if phase:
            settings.append(Setting("phase", phase, "command line"))
        config, _ = configure(settings, inherit=True, to_run=to_run)
        again.write_text(config.to_yaml(), encoding="utf-8")
        same = configure(read_settings(again), inherit=False, to_run=False)[0].dump() == config.dump()
        return "accepted" if same else "differs when read again", ""
    except UserError as error:
        return "refused", str(error)
    except Exception:
        return "traceback", traceback.format_exc()


def by_command(count: int, seed: int, work: Path) -> Iterator[dict]:
    """The same kinds of cases through `sparring config`, each in a new process."""
    cases, made = Cases(seed, work), 0
    while made < count:
        phase, words, file = cases.next()
        if any("\0" in word for word in words) or phase == "all":
            continue  # command lines cannot contain NUL
        command = [sys.executable, "-m", "sparring", "config", phase or "finetune", *words]
        command += ["--config", str(file)] if file else []
        made, began = made + 1, time.monotonic()
        output = {"capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(command, timeout=120, cwd=work, **output)
            verdict = {0: "accepted", 2: "refused"}.get(done.returncode, "other exit code")
            verdict = "traceback" if "Traceback" in done.stderr else verdict
            message = done.stderr
        except subprocess.TimeoutExpired:
            verdict, message = "hang", ""
        trial = {"verdict": verdict, "seconds": round(time.monotonic() - began, 3), "mb_grown": 0.0}
        trial |= {"characters": len(message)}
        yield trial | ({"case": " ".join(command[3:]), "output": message[-500:]} if verdict in BAD else {})


def settings_of(kinds: list[tuple[str, str]]) -> list[Setting]:
    return [Setting(f"{section}.name", name, "") for section, name in kinds]


def _own_keys() -> list[tuple[str, str]]:
    """Keys of envs and networks that are not the default."""
    classes = [pair for kinds in KINDS for pair in SCHEMA.classes(settings_of(kinds)).items()]
    return sorted({(section, leaf) for section, cls in classes for leaf in cls.model_fields})


KINDS = [[("policy", name)] for name in ("flow", "vla", "pi0", "native_vla")] + [[("env", "gym:CartPole-v1")]]


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
