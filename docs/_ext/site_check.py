"""Look at the built documentation in a browser: ``nox -s site``, or ``python docs/_ext/site_check.py FOLDER``.

Each page is opened in Chromium at three widths, light and dark. A page fails where

- axe, the accessibility checker, finds something serious or critical;
- it is wider than the window, or taller than `TALLEST`;
- a picture has no alternative text, or one too short to say what the picture shows;
- the words in a box of a drawing stick out of it;
- a script fails, or anything is asked of another host.

The whole site is looked at on a telephone in light colours, and the pages of `EVERYWHERE` at every width and in both
colours. Arguments limit the pages: ``nox -s site -- --page benchmarks --screenshots /tmp/shots``.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

Colour = Literal["light", "dark"]
View = tuple[Colour, int, list[str]]

WIDTHS = (1280, 768, 400)
COLOURS: tuple[Colour, ...] = ("light", "dark")
EVERYWHERE = (
    "index",
    "getting-started",
    "first-steps",
    "glossary",
    "versions",
    "architecture",
    "benchmarks",
    "kill-matrix",
    "errata",
    "operations",
    "adapters",
    "offloading",
    "tuning",
    "tutorial",
    "reference/lowbit/quantization/packing",
    "reference/lowbit/quantization/bfp",
    "reference/lowbit/linear/linear",
    "reference/lowbit/moe/offload",
)
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
  for (const picture of document.querySelectorAll('article img, article svg.drawing')) {
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


def views(names: Sequence[str], everywhere: Sequence[str]) -> Iterator[View]:
    """Colour, width and pages of each window that is opened."""
    for colour in COLOURS:
        for width in WIDTHS:
            all_of_them = (colour, width) == ("light", min(WIDTHS))
            yield colour, width, [name for name in names if all_of_them or name in everywhere]


def faults_of(page: Page, name: str) -> list[str]:
    """What is wrong with the page that is open."""
    found: list[str] = page.evaluate(LAYOUT, [TALLEST, SHORTEST_ALT])
    answer: dict[str, Any] = Axe().run(page).response
    for violation in answer["violations"]:
        if violation["impact"] in ("serious", "critical"):
            places = "; ".join(" ".join(map(str, node["target"])) for node in violation["nodes"][:3])
            more = f" ({len(violation['nodes'])} places)" if len(violation["nodes"]) > 3 else ""
            found.append(f"{violation['id']}: {violation['help']}: {places}{more}")
    return found


def look(browser: Browser, folder: Path, view: View, shots: Path | None) -> Iterator[str]:
    """Every fault in one window, as a line."""
    colour, width, names = view
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colour)
    page = context.new_page()
    heard: list[str] = []
    page.on("pageerror", lambda error: heard.append(f"a script failed: {error}"))
    page.on("request", lambda asked: heard.append(f"asks {asked.url}") if asked.url.startswith("http") else None)
    for name in names:
        heard.clear()
        page.goto((folder / f"{name}.html").as_uri(), wait_until="load")
        page.evaluate("async () => { if (window.MathJax?.startup?.promise) await window.MathJax.startup.promise }")
        if shots:
            shots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=shots / f"{name.replace('/', '.')}-{width}-{colour}.png")
        for fault in [*heard, *faults_of(page, name)]:
            yield f"{name} at {width} px, {colour}: {fault}"
    context.close()


def main() -> int:
    """Look at the site; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pages were built")
    parser.add_argument("--page", action="append", help="only this page, at every width; may be given several times")
    parser.add_argument("--width", action="append", type=int, choices=WIDTHS, help="only windows of this width")
    parser.add_argument("--screenshots", type=Path, help="keep a picture of the top of each page in this folder")
    options = parser.parse_args()
    folder = options.folder.resolve()
    names = pages(folder)
    if missing := set(options.page or EVERYWHERE) - set(names):
        parser.error(f"{folder} has no page {', '.join(sorted(missing))}: build the documentation first")
    names = options.page or names
    looked = faults = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file(), args=["--no-sandbox"])
        wanted = [view for view in views(names, options.page or EVERYWHERE) if view[1] in (options.width or WIDTHS)]
        for view in wanted:
            for fault in look(browser, folder, view, options.screenshots):
                faults += 1
                print(fault, flush=True)
            looked += len(view[2])
            print(f"{view[1]} px, {view[0]}: {len(view[2])} pages", file=sys.stderr, flush=True)
        browser.close()
    print(f"{looked} views of {len(names)} pages: {faults or 'no'} fault{'s' if faults != 1 else ''}")
    return 1 if faults or not looked else 0


if __name__ == "__main__":
    sys.exit(main())
