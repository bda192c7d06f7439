"use strict";
// Elements, colours and the theme.
const byId = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// Light or dark: the system's preference until the button is used; paper is light.
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
let printing = false;
const theme = () => (printing ? "light" : chosen ?? (system.matches ? "dark" : "light"));
function paint() {
  document.documentElement.dataset.theme = theme();
  byId("theme").textContent = theme() === "dark" ? "light" : "dark";
  redraw();
}
byId("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; paint(); });
system.addEventListener("change", paint);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const blend = (colour, share, other) => `#${channels(colour).map((c, i) => Math.round(share * c + (1 - share) * channels(other)[i]).toString(16).padStart(2, "0")).join("")}`;
const tone = (colour) => (theme() === "dark" ? blend(colour, 0.75, "#ffffff") : colour); // dark colours would vanish on dark paper
const faint = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
const mixed = (colour, share) => blend(colour, share, css("--paper")); // opaque, so that the grid does not show through

// A method's line and symbol, as an image for legends.
const SHAPES = {
  circle: '<circle cx="12" cy="6" r="3.6"/>', square: '<rect x="8.6" y="2.6" width="6.8" height="6.8"/>',
  diamond: '<path d="M12 1.6 16.4 6 12 10.4 7.6 6Z"/>', "triangle-up": '<path d="M12 1.8 16.2 9.4H7.8Z"/>',
  cross: '<path d="M10.6 1.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8V7.4H7.8V4.6h2.8Z"/>', x: '<path d="m8.4 4.1 1.7-1.7L12 4.3l1.9-1.9 1.7 1.7L13.7 6l1.9 1.9-1.7 1.7L12 7.7l-1.9 1.9-1.7-1.7L10.3 6Z"/>',
  star: '<path d="m12 1.4 1.3 3.1 3.3.3-2.5 2.2.8 3.3-2.9-1.8-2.9 1.8.8-3.3-2.5-2.2 3.3-.3Z"/>',
};
const STROKES = { solid: "", dash: "5 3", dot: "1.6 2.4", dashdot: "6 2 1.6 2" };
const GLYPHS = { circle: "●", square: "■", diamond: "◆", "triangle-up": "▲", cross: "✚", x: "✖", star: "★" };
function swatch(entry) {
  const element = make("span", { class: "swatch", style: `--colour: ${entry.colour}` });
  element.innerHTML = `<svg viewBox="0 0 24 12" aria-hidden="true"><path d="M0 6H24" stroke="currentColor" stroke-width="2" stroke-dasharray="${STROKES[entry.dash] ?? ""}"/><g fill="currentColor">${SHAPES[entry.symbol] ?? SHAPES.circle}</g></svg>`;
  return element;
}
