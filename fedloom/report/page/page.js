"use strict";
// Draws the page from its data: embedded in a report, or fetched from the server of a live page.
const byId = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const hidden = new Set();
const known = new Set(); // sections whose initially hidden groups have been applied
const figures = new Map(); // name → {element, figure}
const sorted = new Map(); // table → [column, direction]
let shown = "";

// Light or dark: the system's preference until the button is used.
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
const theme = () => chosen ?? (system.matches ? "dark" : "light");
function paint() {
  document.documentElement.dataset.theme = theme();
  byId("theme").textContent = theme() === "dark" ? "light" : "dark";
  for (const { element, figure } of figures.values()) draw(element, figure);
}
byId("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; paint(); });
system.addEventListener("change", paint);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const visible = (groups = []) => !groups.some((group) => hidden.has(group));
const faint = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const mixed = (colour, share) => `rgb(${channels(colour).map((c, i) => Math.round(share * c + (1 - share) * channels(css("--paper"))[i]))})`; // opaque, so that the grid does not show through

function traces(marks, figure, scale) {
  const hover = { hovertemplate: marks.text ? "%{text}<extra></extra>" : `${marks.name}<br>%{x}: %{y:.4~g}${figure.y.percent ? "%" : ""}<extra></extra>` };
  const common = { name: marks.name, x: marks.x, y: marks.y, text: marks.text, textposition: "none", showlegend: false, visible: visible(marks.groups), ...hover };
  if (marks.kind === "bars") {
    const error = marks.low && { type: "data", symmetric: false, array: marks.high.map((v, i) => v - marks.y[i]), arrayminus: marks.low.map((v, i) => marks.y[i] - v), color: css("--soft"), thickness: 1, width: 3 };
    return [{ ...common, type: "bar", marker: { color: marks.x.map((_, i) => mixed(marks.colour, marks.pale?.[i] ? 0.45 : 1)) }, ...(error && { error_y: error }) }];
  }
  if (marks.kind === "dots") {
    const sizes = marks.sizes ?? [7];
    return [{ ...common, type: "scatter", mode: "markers", marker: {
      size: sizes.length === 1 ? sizes[0] : sizes.map((size) => Math.max(2, scale * size)), opacity: marks.pale ? 0.45 : marks.hollow ? 1 : 0.85,
      color: marks.hollow ? css("--paper") : marks.colour, line: { color: marks.hollow ? marks.colour : css("--paper"), width: marks.hollow ? 2.5 : 0.6 },
    } }];
  }
  const line = { ...common, type: "scatter", mode: marks.x.length > 40 ? "lines" : "lines+markers", line: { color: marks.colour, width: 2, dash: marks.dashed ? "dash" : "solid" }, marker: { size: 5, color: marks.colour } };
  if (!marks.low) return [line];
  const edge = { type: "scatter", mode: "lines", x: marks.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false, visible: visible([...(marks.groups ?? []), "band"]) };
  return [{ ...edge, y: marks.low }, { ...edge, y: marks.high, fill: "tonexty", fillcolor: faint(marks.colour, 0.16) }, line];
}

// Ticks of a logarithmic axis: 1, 2, 5, 10, 20, … over the range of the values.
function decades(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) for (const digit of [1, 2, 5]) all.push(digit * 10 ** power);
  const inside = all.filter((value) => value >= low / 1.5 && value <= high * 1.5);
  const kept = inside.length > 8 ? inside.filter((value) => Number.isInteger(Math.log10(value))) : inside;
  return { tickvals: kept, ticktext: kept.map((value) => value.toLocaleString("en")) };
}

function axis(described, length, values) {
  const base = { title: { text: described.title ?? "", font: { size: 12 }, standoff: 10 }, gridcolor: css("--grid"), zeroline: false, automargin: true, ticksuffix: described.percent ? "%" : "", type: described.log ? "log" : "linear", linecolor: css("--line") };
  if (described.bare) return { ...base, visible: false };
  if (described.whole && Math.max(...values) - Math.min(...values) < 9) base.dtick = 1;
  if (!described.labels) return { ...base, ...(described.log && decades(values)) };
  const step = Math.max(1, Math.ceil(described.labels.length / length));
  const at = described.labels.map((_, i) => i).filter((i) => i % step === 0);
  return { ...base, tickvals: at, ticktext: at.map((i) => described.labels[i]), range: [-0.6, described.labels.length - 0.4], showgrid: described.labels.length < 60, tickangle: 0 };
}

const TOOLS = 22; // extra pixels above the plot area for Plotly's buttons, which would otherwise cover data

function draw(element, figure) {
  const narrow = element.clientWidth < 420;
  const layout = {
    height: (figure.square ? Math.min(element.clientWidth, 320) : figure.height) + TOOLS, margin: { l: 8, r: 10, t: 8 + TOOLS, b: 8 }, hovermode: "closest", barmode: "group", bargap: 0.25,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") }, // Plotly's default is a dark box
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
    hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, align: "left" },
    xaxis: axis(figure.x, narrow ? 10 : 22, figure.marks.flatMap((marks) => marks.x)), yaxis: axis(figure.y, 34),
  };
  if (figure.marks.some((marks) => marks.kind === "bars")) layout.xaxis.showgrid = false;
  const largest = Math.max(1, ...figure.marks.flatMap((marks) => marks.sizes ?? []));
  const scale = Math.min(1, (0.85 * element.clientWidth) / (figure.x.labels?.length ?? 1) / largest); // so that neighbouring dots do not touch
  Plotly.react(element, figure.marks.flatMap((marks) => traces(marks, figure, scale)), layout, { displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] });
}

function switches(entries) {
  return entries.map((entry) => {
    const button = make("button", { type: "button", class: "switch", "data-group": entry.group, "aria-pressed": String(!hidden.has(entry.group)), style: `--colour: ${entry.colour}`, title: "click: hide or show; double-click: show only this one" }, entry.name);
    button.addEventListener("click", () => { hidden.has(entry.group) ? hidden.delete(entry.group) : hidden.add(entry.group); refresh([entry.group]); });
    button.addEventListener("dblclick", () => {
      const others = entries.filter((other) => other !== entry).map((other) => other.group);
      const alone = others.every((group) => hidden.has(group));
      hidden.delete(entry.group);
      for (const group of others) alone ? hidden.delete(group) : hidden.add(group);
      refresh([entry.group, ...others]);
    });
    return button;
  });
}

function refresh(changed) {
  const concerns = (marks) => changed.some((group) => marks.groups?.includes(group) || (group === "band" && marks.low));
  for (const button of document.querySelectorAll(".switch")) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.group)));
  for (const row of document.querySelectorAll("tr[data-group]")) row.classList.toggle("off", hidden.has(row.dataset.group));
  for (const { element, figure } of figures.values()) if (figure.marks.some(concerns)) draw(element, figure);
}

function tableOf(table) {
  const body = make("tbody");
  const heads = table.columns.map((column, i) => {
    const button = make("button", { type: "button", title: column.help ?? "" }, column.name);
    button.addEventListener("click", () => { sorted.set(table.name, [i, sorted.get(table.name)?.[0] === i ? -sorted.get(table.name)[1] : i === 0 ? 1 : -1]); fill(); });
    return make("th", { scope: "col" }, button);
  });
  const compare = (a, b) => a === undefined || b === undefined ? (a === undefined) - (b === undefined) : typeof a === "string" ? a.localeCompare(b) : a - b;
  function fill() {
    const [column, direction] = sorted.get(table.name) ?? [-1, 1];
    heads.forEach((head, i) => i === column ? head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    const order = table.rows.map((_, i) => i);
    if (column >= 0) order.sort((a, b) => {
      const [one, other] = [table.rows[a][column].value, table.rows[b][column].value];
      return one === undefined || other === undefined ? compare(one, other) : direction * compare(one, other);
    });
    body.replaceChildren(...order.map((i) => {
      const cells = table.rows[i].map((cell) => make("td", cell.title ? { title: cell.title } : {}, cell.text));
      if (table.colours) cells[0].prepend(make("span", { class: "mark", style: `--colour: ${table.colours[i]}` }));
      const row = make("tr", table.groups ? { "data-group": table.groups[i] } : {}, ...cells);
      row.classList.toggle("off", Boolean(table.groups) && hidden.has(table.groups[i]));
      return row;
    }));
  }
  fill();
  const whole = make("div", { class: "table" }, make("table", { id: `table-${table.name}` }, make("thead", {}, make("tr", {}, ...heads)), body));
  if (table.note) whole.append(make("p", {}, table.note));
  return whole;
}

function figureOf(figure) {
  const element = figures.get(figure.name)?.element ?? make("div", { class: "plot", id: `plot-${figure.name}` });
  element.style.minHeight = `${(figure.square ? 240 : figure.height) + TOOLS}px`;
  figures.set(figure.name, { element, figure });
  const whole = make("figure", figure.wide ? { class: "wide" } : {}, make("h3", {}, figure.title), element);
  if (figure.note) whole.append(make("figcaption", {}, figure.note));
  return whole;
}

function sectionOf(section) {
  if (!known.has(section.name) && (section.figures || section.tables)) {
    known.add(section.name);
    for (const group of section.hidden ?? []) hidden.add(group);
  }
  const whole = make("section", { id: section.name }, make("h2", {}, section.title));
  if (section.text) whole.append(make("p", { class: "lead" }, section.text));
  if (section.missing) whole.append(make("p", { class: "missing" }, section.missing));
  whole.append(...(section.tables ?? []).map(tableOf));
  if (section.legend && section.figures) whole.append(make("div", { class: "legend" }, ...switches(section.legend)));
  if (section.figures) whole.append(make("div", { class: section.figures.every((f) => f.square) ? "grid small" : "grid" }, ...section.figures.map(figureOf)));
  whole.append(...(section.texts ?? []).map(([title, text]) => make("details", {}, make("summary", {}, title), make("pre", {}, text))));
  return whole;
}

function show(page) {
  const place = [scrollX, scrollY];
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  document.title = page.title;
  byId("title").textContent = page.title;
  byId("facts").replaceChildren(...(page.facts ?? []).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  say(page.state, page.running ? "running" : "");
  const gone = new Set(figures.keys());
  const sections = (page.sections ?? []).map(sectionOf);
  for (const section of page.sections ?? []) for (const figure of section.figures ?? []) gone.delete(figure.name);
  for (const name of gone) { Plotly.purge(figures.get(name).element); figures.delete(name); }
  byId("legend").replaceChildren(...switches(page.legend ?? []));
  byId("page").replaceChildren(...sections);
  for (const summary of document.querySelectorAll("summary")) summary.parentElement.open = open.has(summary.textContent);
  paint();
  scrollTo(...place);
}

function say(text, kind) {
  shown = kind === "lost" ? shown : text;
  byId("state").textContent = text;
  byId("state").className = kind;
}

// The browser reconnects automatically; the page keeps showing the last data until then.
function listen() {
  let busy = false, again = false;
  async function load() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch("data.json");
      if (answer.ok) show(await answer.json());
    } catch { say(`${shown} · connection lost, reconnecting`, "lost"); }
    busy = false;
    if (again) { again = false; load(); }
  }
  const events = new EventSource("events");
  events.onmessage = load;
  events.onerror = () => {
    say(`${shown} · connection lost, reconnecting`, "lost");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

document.documentElement.dataset.theme = theme();
const embedded = JSON.parse(byId("data").textContent);
embedded ? show(embedded) : listen();
