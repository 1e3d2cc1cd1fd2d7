"""The page in a browser: charts, interaction, no external requests. Skipped without Chromium."""

import shutil
from threading import Thread

import pytest
from doubles_report import make_run, metrics_line, write_lines

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.processes.server import HOST
from sparring.report.page import open_server

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'sparring[browser]'")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"{program} does not start here: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


class Visit:
    """A page, its requests and its console messages."""

    def __init__(self, browser, address, width=1280, scheme="light", touch=False):
        size = {"width": width, "height": 900}
        self.page = browser.new_page(viewport=size, color_scheme=scheme, has_touch=touch)
        self.log, self.urls = [], []
        self.page.on("console", lambda message: self.log.append(message.text))
        self.page.on("pageerror", lambda error: self.log.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(address)

    def count(self, selector) -> int:
        return self.page.locator(selector).count()

    def text(self, selector) -> str:
        return self.page.locator(selector).inner_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    make_run(folder / "a", pictures=True)
    make_run(folder / "b", seed=1)
    assert main(["report", str(folder), "--output", str(folder / "report.html")]) == 0
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_all_charts_are_drawn_and_fit(browser, report, width, scheme):
    visit = Visit(browser, report, width, scheme)
    titles = [title.inner_text() for title in visit.page.locator("h2").all()]
    shown = (
        "Videos, Predicted and true frames, Success, Learning, Evaluation, Reward terms, Stages, Staleness, "
        "Settings, System"
    )
    assert titles == shown.split(", ")
    # per run: evaluations with a band, rollouts, and a dotted baseline
    assert visit.count("#success path.band") == 2 and visit.count("#success path.curve") == 6 + 2
    points = visit.page.eval_on_selector_all(
        "path.curve", "all => all.map(one => one.getAttribute('d').split('L').length)"
    )
    assert len(points) > 15 and min(points) == 3 and max(points) == 20
    assert visit.page.eval_on_selector_all(
        "#stages path.busy", "all => all.every(one => one.getAttribute('d').length > 100)"
    )
    assert visit.count("#staleness rect.share") == 4
    # the page is not wider than the screen
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 24)"
    assert dark == (scheme == "dark")
    # visible videos are data of the page
    assert visit.log == [] and [url for url in visit.urls if not url.startswith(("data:", "blob:"))] == [report]
    assert visit.page.eval_on_selector_all("figure.chart", "all => all.every(one => one.ariaLabel.length > 20)")


def test_incomparable_curves_have_separate_charts(browser, tmp_path):
    settings = {"dense": {}, "sparse": {"env": {"reward": "sparse"}}, "teacher": {"phase": "teacher"}}
    for name, changed in settings.items():
        make_run(tmp_path / name)
        config = load_config(changed | {"output": str(tmp_path / name)})
        (tmp_path / name / "config.yaml").write_text(config.to_yaml())
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0
    visit = Visit(browser, (tmp_path / "report.html").as_uri())
    titles = [title.inner_text().lower() for title in visit.page.locator("#learning figcaption").all()]
    for kind in ("episode reward, dense rewards", "episode reward, sparse rewards", "episode reward, accuracy"):
        assert any(title.startswith(kind) for title in titles), titles
    for kind in ("loss, ppo", "loss, world model"):
        assert any(title.startswith(kind) for title in titles), titles
    assert visit.log == []


def test_single_measurements_are_text(browser, tmp_path):
    for name in "ab":
        lines = (make_run(tmp_path / name, seed=ord(name)) / "evaluations.jsonl").read_text().splitlines()
        (tmp_path / name / "evaluations.jsonl").write_text(lines[-1] + "\n")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0
    visit = Visit(browser, (tmp_path / "report.html").as_uri())
    assert visit.text("#evaluation .constant").split() == ["Measured", "once:", "Reward", "8", "8"]
    assert visit.count("#evaluation figure") == 0 and visit.log == []
    titles = [visit.page.locator("#evaluation b").nth(i).get_attribute("title") for i in range(2)]
    assert titles == ["seed 97", "seed 98"]


def test_tooltip_shows_the_values_at_the_pointer(browser, report):
    visit = Visit(browser, report)
    plot = visit.page.locator("#success .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 100)
    visit.page.locator("#tip").wait_for()
    shown = visit.text("#tip")
    assert "2,000 steps" in shown and "seed 0, evaluation\n80 %\n60 % to 90 %" in shown
    # with the keyboard
    visit.page.locator("#success figure").first.focus()
    for _ in range(9):
        visit.page.keyboard.press("ArrowLeft")
    assert "1,100 steps" in visit.text("#tip") and "90 %\n70 % to 97 %" in visit.text("#tip")


def test_tooltip_of_a_tap_stays_until_the_next_tap(browser, report):
    visit = Visit(browser, report, 390, touch=True)

    def tap(selector):
        visit.page.locator(selector).first.scroll_into_view_if_needed()
        # scrolling hides the tooltip
        visit.page.wait_for_timeout(200)
        visit.page.locator(selector).first.tap()

    tap("#success .plot")
    assert "seed 1, evaluation" in visit.text("#tip") and visit.count(".cursor line") == 1
    tap("#learning .plot")
    assert "seed 1" in visit.text("#tip") and visit.count(".cursor line") == 1
    tap("#learning h2")
    assert not visit.page.locator("#tip").is_visible() and visit.count(".cursor line") == 0


def test_axes_runs_and_smoothing_can_be_selected(browser, report):
    visit = Visit(browser, report)
    label = visit.page.locator("#success figure").first
    visit.page.get_by_role("button", name="updates").click()
    assert label.get_attribute("aria-label").startswith("Success over updates. ")
    visit.page.get_by_role("button", name="seed 1").click()
    assert visit.count("#success path.band") == 1
    # without smoothing there are no raw curves
    assert visit.count("#learning path.raw") > 0
    visit.page.locator("input[type=range]").fill("0")
    assert visit.count("#learning path.raw") == 0
    assert visit.log == []


# a video gets its source when it becomes visible, which would interrupt playing
PLAY = """async (video) => {
  while (video.readyState < 2) await new Promise((done) => setTimeout(done, 50));
  video.muted = true;
  await video.play();
  const began = video.currentTime;
  await new Promise((done) => setTimeout(done, 500));
  return [video.readyState, video.duration, video.currentTime - began];
}"""
SEEK = """(video) => new Promise((done) => {
  video.pause();
  video.onseeked = () => done(video.currentTime);
  video.currentTime = 1.5;
})"""


# after the first frame is loaded
LOOK = """video => new Promise((done) => {
  const check = () => video.readyState >= 2 ? done([video.paused, video.currentTime]) : setTimeout(check, 50);
  check();
})"""


def page_of(run, browser) -> Visit:
    assert main(["report", str(run)]) == 0
    return Visit(browser, (run / "report.html").as_uri())


def test_single_evaluation_is_drawn_at_the_end_of_the_run(browser, tmp_path):
    run = make_run(tmp_path / "run")
    last = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)[-1]
    (run / "evaluations.jsonl").write_text(last)
    lines = [metrics_line(update, **{"rollout/success_rate": None}) for update in range(1, 21)]
    write_lines(run / "episode_metrics.jsonl", lines)
    visit = page_of(run, browser)
    ticks = visit.page.locator("#success text.tick").all_text_contents()
    assert [tick for tick in ticks if "%" not in tick] == ["0", "500", "1000", "1500", "2000"]
    # the random baseline is still a level
    assert visit.count("#success circle.dot") == 1
    level = visit.page.locator("#success path[stroke-dasharray]").get_attribute("d")
    assert level.startswith("M46 ") and "H" in level


def test_accuracy_equal_to_success_is_not_drawn(browser, tmp_path):
    for name, accuracy, figures in (
        ("finetune", lambda success: success, 0),
        ("student", lambda success: success / 2, 1),
    ):
        run = make_run(tmp_path / name)
        lines = [metrics_line(update) for update in range(1, 21)]
        shown = [line | {"avg_acc": accuracy(line["rollout/success_rate"])} for line in lines]
        write_lines(run / "episode_metrics.jsonl", shown)
        assert page_of(run, browser).count("#learning figure[aria-label^='Accuracy']") == figures


def test_later_evaluations_have_their_own_caption(browser, tmp_path):
    run = make_run(tmp_path / "run", pictures=True)
    (run / "videos/eval_task-lift_d0_0.mp4").write_bytes(b"x")
    line = {"file": "videos/eval_task-lift_d0_0.mp4", "kind": "eval", "settings": "env.task=[lift_d0]", "update": 20}
    write_lines(run / "videos/index.jsonl", [line], "a")
    captions = page_of(run, browser).page.locator("#videos figcaption").all_inner_texts()
    assert [caption.splitlines()[-1].split(" · ")[:2] for caption in captions] == [
        ["evaluation", "update 20"],
        ["sparring eval", "env.task=[lift_d0]"],
        ["evaluation", "update 20"],
    ]


def test_videos_show_a_frame_before_playing(browser, report):
    visit = Visit(browser, report)
    video = visit.page.locator("video").first
    video.scroll_into_view_if_needed()
    assert video.evaluate(LOOK) == [True, pytest.approx(0.1)]
    assert visit.log == []


def test_videos_play_and_failures_come_first(browser, report):
    visit = Visit(browser, report)
    assert "✕ failure" in visit.text("#videos figure:nth-of-type(1)")
    video = visit.page.locator("video").first
    video.scroll_into_view_if_needed()
    ready, duration, played = video.evaluate(PLAY)
    assert ready >= 2 and duration == pytest.approx(2, abs=0.2) and played > 0.1
    assert visit.page.locator("#strips img").evaluate("image => image.naturalWidth") == 16
    assert visit.log == []


def test_live_page_follows_its_run(browser, tmp_path):
    run = tmp_path / "run"
    server = open_server([run], 17430)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{HOST}:{server.server_address[1]}/"
    visit = Visit(browser, address)
    assert visit.text("#main") == "Nothing to show yet. This page refreshes every second."
    make_run(run, pictures=True, state="crashed", why="RuntimeError: <b>bold</b>")
    # the section that is written last
    visit.page.wait_for_selector("#strips")
    assert visit.text(".why") == "RuntimeError: <b>bold</b>"
    video = visit.page.locator("video").first
    video.scroll_into_view_if_needed()
    assert video.evaluate(PLAY)[2] > 0.1 and video.evaluate(SEEK) == pytest.approx(1.5)
    visit.page.evaluate("window.before = document.querySelector('video')")
    reward = visit.page.locator("#learning figure").first
    assert "last 20," in reward.get_attribute("aria-label")
    write_lines(run / "episode_metrics.jsonl", [metrics_line(21, episode_reward=77.0)], "a")
    visit.page.wait_for_selector("#learning figure[aria-label*='last 77,']", timeout=15000)
    # a playing video is not replaced
    assert visit.page.evaluate("window.before === document.querySelector('video') && window.before.currentTime") == 1.5
    assert visit.log == [] and all(url.startswith((address, "data:")) for url in visit.urls)
    visit.page.route("**/data.json*", lambda route: route.abort())
    visit.page.wait_for_selector(".live.lost", timeout=15000)
    # another response, then the server's own again
    visit.page.unroute("**/data.json*")
    visit.page.route("**/data.json*", lambda route: route.fulfill(body="<h1>down</h1>"), times=2)
    visit.page.wait_for_selector(".live:not(.lost)", timeout=15000)
    server.shutdown()
    server.server_close()
