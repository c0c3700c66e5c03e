"""A real browser without a screen, for tests of the page; where there is none, they are skipped and say so.

Debian's Chromium is used (``apt-get install chromium``), driven by playwright, which brings none of its own.
"""

import contextlib
import shutil
from importlib.util import find_spec

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-default-apps"),
)
HANGS_MS = 60_000
"""What a page does not show by then it never does; a busy machine may need seconds."""

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="no browser: apt-get install chromium, pip install playwright",
)


@contextlib.contextmanager
def browser():
    """Give a browser with no network but the tests' own servers."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield found
        found.close()


class Watched:
    """A page of which everything is written down that it should not do."""

    def __init__(self, chromium, origin, **settings):
        self.context = chromium.new_context(**settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(HANGS_MS)
        self.errors = []
        self.strangers = []
        self.page.on("console", lambda message: self._heard(message))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, origin))

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, url, origin):
        if not url.startswith((origin, "data:", "blob:")):
            self.strangers.append(url)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.context.close()
        if kind is None:
            self.check()

    def check(self):
        """Everything so far was as it should be."""
        assert self.errors == [], self.errors
        assert self.strangers == [], self.strangers

    def open(self, url):
        """Open an address and wait until there is something to see."""
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")
        return self.page


CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const part = (value) => linear(value / 255);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (element) => {
    for (let at = element; at !== null; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return numbers(getComputedStyle(document.documentElement).backgroundColor);
  };
  const poor = [];
  for (const element of document.querySelectorAll("main *, header *, footer")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== "");
    const seen = element.getClientRects().length > 0 && element.closest(":disabled, .unseen") === null;
    if (!own || !seen) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(numbers(style.color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) poor.push(`${element.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Texts with less contrast than WCAG AA asks for."""

UNNAMED = """() => {
  const named = (element) => (element.getAttribute("aria-label") ?? "").trim() !== ""
    || document.getElementById(element.getAttribute("aria-labelledby")) !== null
    || (element.textContent ?? "").trim() !== "";
  const bad = [];
  const words = "button, a, [role=slider], [role=region], section, meter, progress, dialog";
  for (const element of document.querySelectorAll(words)) {
    if (!named(element)) bad.push(element.outerHTML.slice(0, 80));
  }
  for (const table of document.querySelectorAll("table")) {
    if ((table.caption?.textContent ?? "").trim() === "") bad.push("table without a caption");
  }
  if (document.querySelector("th:not([scope])") !== null) bad.push("th without scope");
  for (const picture of document.querySelectorAll("canvas")) {
    if (picture.closest("[role=slider][aria-valuetext]") === null) bad.push("canvas that is told nowhere");
  }
  for (const tag of ["main", "header", "footer", "h1"]) {
    if (document.querySelectorAll(`body > ${tag}, main > ${tag}`).length !== 1) bad.push(`not one ${tag}`);
  }
  if (document.documentElement.lang === "") bad.push("no language");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) bad.push("an id twice");
  let level = 0;
  for (const head of document.querySelectorAll("h1, h2, h3, h4")) {
    const next = Number(head.tagName[1]);
    if (next > level + 1) bad.push(`${head.textContent} leaves out a level`);
    level = next;
  }
  return bad;
}"""
"""What a screen reader could not make sense of."""
