"""Look at the built documentation in a browser: ``nox -s site``, or ``python docs/_ext/site_check.py FOLDER``.

Each page is opened in Chromium at three widths, light and dark. A page fails where

- axe, the accessibility checker, finds something serious or critical;
- it is wider than the window, or taller than `TALLEST`;
- a picture has no alternative text, or one too short to say what the picture shows;
- the words in a box of a drawing stick out of it;
- a script fails, or anything is asked of another host.

Every page is opened once, and its window then takes all six views. axe's rules other than contrast depend on the width
only, and contrast on the colours only; of the many parts of a page that are drawn alike, such as the tokens of code,
axe then looks at a few. The lists of pages in the sidebar are made alike: axe reads that of the first page only.
Arguments limit the pages: ``nox -s site -- --page benchmarks --screenshots /tmp/shots``.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

Colour = Literal["light", "dark"]

WIDTHS = (1280, 768, 400)
COLOURS: tuple[Colour, ...] = ("light", "dark")
TALLEST = 60_000
"""Pixels; a page above this height on a telephone cannot be read by scrolling."""
SHORTEST_ALT = 25
"""Characters; fewer name a picture and do not say what it shows."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# What is wrong with the page as it stands in the window; a list of sentences.
LAYOUT = """
([tallest, shortest]) => {
  const found = [], root = document.documentElement
  if (root.scrollWidth > innerWidth) {
    const inside = (e) => { for (let p = e.parentElement; p; p = p.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true; return false }
    const wide = [...document.querySelectorAll('article *')]
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !inside(e)).slice(0, 3)
      .map((e) => `${e.tagName.toLowerCase()}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`)
    found.push(`the page is ${root.scrollWidth} px wide: ${wide.join('; ')}`)
  }
  if (root.scrollHeight > tallest)
    found.push(`the page is ${root.scrollHeight} px tall; at most ${tallest} are allowed`)
  for (const picture of document.querySelectorAll('article img:not(.toggler), article svg.drawing')) {
    const said = picture.getAttribute('alt') ?? picture.getAttribute('aria-label') ?? ''
    if (said.length < shortest) found.push(`a picture says only "${said}": ${picture.getAttribute('src') ?? ''}`)
  }
  for (const drawing of document.querySelectorAll('article svg.drawing')) {
    const boxes = [...drawing.querySelectorAll('rect')].map((box) => box.getBoundingClientRect())
    for (const text of drawing.querySelectorAll('text')) {
      const t = text.getBoundingClientRect(), middle = (t.left + t.right) / 2
      const box = boxes.filter((b) => b.left < middle && middle < b.right && b.top < t.bottom && t.top < b.bottom)
        .sort((a, b) => a.width - b.width)[0]
      if (box && (t.left < box.left || t.right > box.right || t.top < box.top || t.bottom > box.bottom))
        found.push(`"${text.textContent}" sticks out of its box`)
      const picture = drawing.getBoundingClientRect()
      if (t.left < picture.left - 1 || t.right > picture.right + 1) found.push(`"${text.textContent}" is cut off`)
    }
  }
  return found
}
"""

# Leaves `kept` parts of each kind on the page: those of one kind have the same tags, classes and styles up to the body.
THIN = """
(kept) => {
  const seen = new Map(), kinds = new Map([[document.body, '']])
  const kind = (e) => {
    if (!kinds.has(e)) {
      const own = [e.tagName, e.getAttribute('class'), e.getAttribute('style'), e.getAttribute('role')].join('|')
      kinds.set(e, `${kind(e.parentElement)}>${own}`)
    }
    return kinds.get(e)
  }
  document.querySelectorAll('mjx-container svg').forEach((drawn) => drawn.remove())
  const leaves = [...document.body.querySelectorAll('*:not(:has(*))')].filter((e) => !e.closest('svg, script, style'))
  const length = (e) => Math.min(e.textContent.trim().length, 3)  // axe does not judge a single character
  leaves.sort((a, b) => length(b) - length(a))
  for (const [leaf, its] of leaves.map((e) => [e, kind(e)])) {
    seen.set(its, (seen.get(its) ?? 0) + 1)
    if (seen.get(its) > kept) leaf.remove()
  }
}
"""
KEPT = 3
WITHOUT_LIST = "() => document.querySelector('.sidebar-tree')?.remove()"


def browser_file() -> str:
    """The program of the browser: that of LOWBIT_BROWSER, or the first that is installed.

    Raises:
        SystemExit: there is none; the message says how to install one.
    """
    found = os.environ.get("LOWBIT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        raise SystemExit(
            "no browser was found: install Chromium (Debian and Ubuntu: apt-get install chromium), or set "
            "LOWBIT_BROWSER to the program of a browser that is built from it"
        )
    return found


def pages(folder: Path) -> list[str]:
    """Every page of a built site, by the name of its document."""
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.html"))]
    return [name for name in names if not name.startswith("_") and name != "search"]


def layout_faults(page: Page) -> list[str]:
    """What does not fit in the window as it is."""
    found: list[str] = page.evaluate(LAYOUT, [TALLEST, SHORTEST_ALT])
    return found


def axe_faults(page: Page, rules: dict[str, Any]) -> list[str]:
    """What axe finds serious or critical by some of its rules."""
    answer: dict[str, Any] = Axe().run(page, options={**rules, "resultTypes": ["violations"]}).response
    found = []
    for violation in answer["violations"]:
        if violation["impact"] in ("serious", "critical"):
            places = "; ".join(" ".join(map(str, node["target"])) for node in violation["nodes"][:3])
            more = f" ({len(violation['nodes'])} places)" if len(violation["nodes"]) > 3 else ""
            found.append(f"{violation['id']}: {violation['help']}: {places}{more}")
    return found


def show(page: Page, width: int, colour: Colour) -> None:
    """Give the window a width and a colour."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=colour)


def faults_of(page: Page, widths: Sequence[int], shot: Callable[[int, Colour], None], first: bool) -> Iterator[str]:
    """What is wrong with the page that is open, in every view; parts of the page are removed before the last checks."""
    for width in widths:
        for colour in COLOURS:
            show(page, width, colour)
            shot(width, colour)
            yield from (f"{width} px, {colour}: {fault}" for fault in layout_faults(page))
    if not first:
        page.evaluate(WITHOUT_LIST)
    for width in widths:
        show(page, width, COLOURS[0])
        rules = {"rules": {"color-contrast": {"enabled": False}}}
        yield from (f"{width} px: {fault}" for fault in axe_faults(page, rules))
    page.evaluate(THIN, KEPT)
    for colour in COLOURS:
        show(page, widths[0], colour)
        yield from (f"{colour}: {fault}" for fault in axe_faults(page, {"runOnly": ["color-contrast"]}))


def look(
    browser: Browser, folder: Path, name: str, widths: Sequence[int], shots: Path | None, first: bool
) -> Iterator[str]:
    """Every fault of one page, as a line."""
    context = browser.new_context()
    page = context.new_page()
    heard: list[str] = []
    page.on("pageerror", lambda error: heard.append(f"a script failed: {error}"))
    page.on("request", lambda asked: heard.append(f"asks {asked.url}") if asked.url.startswith("http") else None)
    page.goto((folder / f"{name}.html").as_uri(), wait_until="load")
    page.evaluate("async () => { if (window.MathJax?.startup?.promise) await window.MathJax.startup.promise }")

    def shot(width: int, colour: Colour) -> None:
        if shots:
            page.screenshot(path=shots / f"{name.replace('/', '.')}-{width}-{colour}.png")

    for fault in [*faults_of(page, widths, shot, first), *heard]:
        yield f"{name}: {fault}"
    context.close()


def main() -> int:
    """Look at the site; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pages were built")
    parser.add_argument("--page", action="append", help="only this page; may be given several times")
    parser.add_argument("--width", action="append", type=int, choices=WIDTHS, help="only windows of this width")
    parser.add_argument("--screenshots", type=Path, help="keep a picture of the top of each page in this folder")
    options = parser.parse_args()
    folder = options.folder.resolve()
    names = pages(folder)
    if missing := set(options.page or ["index"]) - set(names):
        parser.error(f"{folder} has no page {', '.join(sorted(missing))}: build the documentation first")
    names, widths, faults = options.page or names, options.width or WIDTHS, 0
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file(), args=["--no-sandbox"])
        for number, name in enumerate(names, 1):
            print(f"{number} of {len(names)}: {name}", file=sys.stderr, flush=True)
            for fault in look(browser, folder, name, widths, options.screenshots, number == 1):
                faults += 1
                print(fault, flush=True)
        browser.close()
    views = len(names) * len(widths) * len(COLOURS)
    print(f"{views} views of {len(names)} pages: {faults or 'no'} fault{'s' if faults != 1 else ''}")
    return 1 if faults or not names else 0


if __name__ == "__main__":
    sys.exit(main())
