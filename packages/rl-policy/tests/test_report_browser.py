"""The page of a report in a real browser, without a network.

The browser is `chromium` or `google-chrome` on the path, or what RL_POLICY_BROWSER names; `nox -s
browser` brings one.
"""

import os
import shutil

import pytest
from report_runs import HOSTILE, write_run

pytestmark = [pytest.mark.needs("rl-policy[report]")]
pytest.importorskip("plotly", reason="comes with the extra report")
sync_api = pytest.importorskip("playwright.sync_api", reason="nox -s browser installs it")
from rl_policy.report.page import write_page  # noqa: E402
from rl_policy.report.run_data import read_run  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = [path for name in NAMES if (path := shutil.which(name))]
BROWSER = os.environ.get("RL_POLICY_BROWSER") or next(iter(FOUND), None)
# Root has no sandbox, and a machine without a display no GPU.
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
WIDTHS = {"desktop": 1280, "phone": 390}


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip(f"there is no {', '.join(NAMES)}: set RL_POLICY_BROWSER, or run nox -s browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Return a function that opens a file; at the end, nothing has failed or been fetched."""
    problems, pages, path_of = [], [], {}

    def open_page(path, width=WIDTHS["desktop"]):
        context = chromium.new_context(viewport={"width": width, "height": 800}, offline=True)
        page = context.new_page()
        pages.append(context)
        path_of["url"] = path.as_uri()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on(
            "request",
            lambda request: request.url in path_of.values() or problems.append(request.url),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("#charts .main-svg")
        return page

    yield open_page
    for context in pages:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the report of a run whose texts are hostile."""
    path = write_run(tmp_path_factory.mktemp("runs") / "first", prompt=HOSTILE)
    write_page([read_run(path)], path / "report.html")
    return path / "report.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Return the comparison of two runs."""
    root = tmp_path_factory.mktemp("runs")
    runs = [read_run(write_run(root / name)) for name in ("first", "second")]
    write_page(runs, root / "compare.html")
    return root / "compare.html"


def titles(page, group):
    return page.locator(f"#{group} h3").all_inner_texts()


def test_every_chart_is_drawn(open_page, report):
    page = open_page(report)
    assert {"Reward", "Loss", "Time per phase", "Peak memory", "Staleness"} <= {
        *titles(page, "charts")
    }
    assert titles(page, "warm-up-charts") == ["Held-out accuracy", "Loss"]
    # Lines are drawn, not only the frames around them.
    lines = (
        page.locator("#charts article")
        .filter(has_text="Loss")
        .locator(".scatterlayer path.js-line")
    )
    assert lines.count() == 1
    assert (
        page.locator("#charts article")
        .filter(has_text="Time per phase")
        .locator(".bars .point")
        .count()
        == 4 * 4
    )


def test_a_click_on_a_sample_shows_its_tokens(open_page, report):
    page = open_page(report)
    assert page.locator(".token").count() == 0
    page.locator(".sample").nth(1).click()
    assert page.locator(".token").all_inner_texts() == ["9", "<|im_end|>"]
    assert page.locator(".tokens .prompt").inner_text() == HOSTILE
    likely, unlikely = (
        page.locator(".token").nth(index).evaluate("each => each.style.background")
        for index in (0, 1)
    )
    assert likely != unlikely
    assert page.locator(".token").nth(1).get_attribute("title") == "log-probability -2.5"
    page.locator(".sample").nth(1).click()
    assert page.locator(".token").count() == 0


def test_tokens_are_coloured_by_advantage_where_there_is_one(open_page, report):
    page = open_page(report)
    assert page.locator("#colour option[value=advantage]").is_disabled()
    page.select_option("#step", label="training batch of step 4")
    page.select_option("#colour", "advantage")
    for index in (0, 1):
        page.locator(".sample").nth(index).click()
    colours = [
        token.evaluate("each => getComputedStyle(each).backgroundColor")
        for token in page.locator(".token").all()
    ]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    page.select_option("#colour", "logprob")
    assert page.locator(".token").count() == 4, "what was open stays open"


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_a_page_is_no_wider_than_its_window(open_page, request, width, name):
    page = open_page(request.getfixturevalue(name), width)
    for button in page.locator(".sample").all():
        button.click()
    for details in page.locator("details").all():
        details.evaluate("each => each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    chart = page.locator("#charts .chart").first.bounding_box()
    assert 300 <= chart["width"] <= width
    page.screenshot(path=request.config.cache.mkdir("reports") / f"{name}-{width}.png")


def test_a_comparison_lets_its_reader_choose_the_run(open_page, comparison):
    page = open_page(comparison)
    loss = (
        page.locator("#charts article")
        .filter(has_text="Loss")
        .locator(".scatterlayer path.js-line")
    )
    assert loss.count() == 2
    page.select_option("#run", "second")
    page.locator(".sample").first.click()
    assert page.locator(".token").all_inner_texts() == ["8", "<|im_end|>"]
