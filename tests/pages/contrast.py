"""How well the text of a page can be read: WCAG's contrast of each piece that is seen."""

from __future__ import annotations

from playwright.sync_api import Page

FAINT = """() => {
  const channel = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parsed = (colour) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((v, i) => v * (1 - top[3]) + top[i] * top[3]);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parsed(getComputedStyle(e).backgroundColor));
    const start = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    return layers.reverse().reduce((below, layer) => (layer[3] ? over(layer, below) : below), start);
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode()); ) {
    const element = text.parentElement;
    const words = text.textContent.trim();
    if (!words || ["SCRIPT", "STYLE", "OPTION"].includes(element.tagName)) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    if (element.matches(".step-link:not([href])") || element.closest("[disabled], .disabled")) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const [high, low] = [light(over(parsed(style.color), ground)), light(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (large ? 3 : 4.5)) found.push(`${words.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""

STILL = """() => document.getAnimations()
    .filter((one) => Number.isFinite(one.effect.getComputedTiming().endTime))
    .forEach((one) => one.finish())"""


def faint(page: Page) -> list[str]:
    """Texts that are seen, with a contrast below 4.5 (3 where they are large)."""
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    page.evaluate(STILL)  # colours of chips fade in
    found: list[str] = page.evaluate(FAINT)
    return found
