// Figures. They are drawn when they come near the screen, one per frame: Plotly is evaluated with the first of them.
const figures = new Map(); // name → {element, figure, words, stale}
const tools = () => (printing ? 0 : 22); // extra pixels above the plot area for Plotly's buttons, which would otherwise cover data
const ON_PAPER = 0.75; // height of figures on paper, so that two rows of them fit on a page
const watcher = new IntersectionObserver((entries) => { for (const entry of entries) { entry.target.near = entry.isIntersecting; } work(); }, { rootMargin: "400px 0px" });
let working = 0;

const look = (marks) => methods().find((entry) => entry.group === marks.groups?.[0]) ?? { dash: "solid", symbol: "circle" };
const bandOf = (figure) => band ?? figure.band;

function redraw() {
  for (const known of figures.values()) known.stale = true;
  work();
}

const loaded = new Promise((done) => document.readyState === "complete" ? done() : addEventListener("load", () => setTimeout(done)));
async function work() {
  await loaded;
  if (!working) working = requestAnimationFrame(drawNext);
}
function drawNext() {
  working = 0;
  for (const known of figures.values()) {
    if (known.stale && known.element.near && known.element.isConnected) {
      drawKnown(known);
      working = requestAnimationFrame(drawNext);
      return;
    }
  }
}
function plotly() {
  if (!window.Plotly) document.head.append(make("script", {}, byId("plotly").textContent));
  return window.Plotly;
}
function drawKnown(known) {
  known.stale = false;
  if (shows(known.figure)) draw(known.element, known.figure, known.words);
}

// Whether one of a figure's methods is selected; small figures of single methods come and go with the selection.
const ofMethods = (marks) => (marks.groups ?? []).filter((group) => group.startsWith("method:"));
const needsLegend = (figure) => !figure.y.rows && new Set(figure.marks.flatMap(ofMethods)).size > 1;
const shows = (figure) => figure.marks.some((marks) => visible(ofMethods(marks)));

function hoverOf(marks, figure, words) {
  const unit = (axis) => (axis?.percent ? "%" : "");
  const value = figure.y.rows ? `%{x:.4~g}${unit(figure.x)}` : `%{y:.4~g}${unit(figure.y)}`;
  if (marks.words) return { text: marks.words.map((number) => words[number]), hovertemplate: `${marks.name}<br>%{text}<br>${value}<extra></extra>` };
  if (marks.text) return { text: marks.text, hovertemplate: "%{text}<extra></extra>" };
  return { hovertemplate: figure.x.bare ? `${marks.name}<extra></extra>` : `${marks.name}<br>%{x}: ${value}<extra></extra>` };
}

function traces(marks, figure, scale, words, rowOf) {
  const colour = tone(marks.colour), { dash, symbol } = look(marks);
  const y = rowOf ? marks.y.map((value) => value - Math.round(value) + rowOf(Math.round(value))) : marks.y;
  const common = { name: marks.name, x: marks.x, y, textposition: "none", showlegend: false, visible: visible(marks.groups), ...hoverOf(marks, figure, words) };
  if (marks.kind === "bars") {
    const error = marks.low && { type: "data", symmetric: false, array: marks.high.map((v, i) => v - marks.y[i]), arrayminus: marks.low.map((v, i) => marks.y[i] - v), color: css("--soft"), thickness: 1, width: 3 };
    return [{ ...common, type: "bar", marker: { color: marks.x.map((_, i) => mixed(colour, marks.pale?.[i] ? 0.45 : 1)) }, ...(error && { error_y: error }) }];
  }
  if (marks.kind === "dots") {
    const sizes = marks.sizes ?? [7], large = sizes.length === 1 && sizes[0] > 10;
    return [{ ...common, type: "scatter", mode: "markers", marker: {
      size: sizes.length === 1 ? sizes[0] : sizes.map((size) => Math.max(2, scale * size)), opacity: marks.pale ? 0.45 : marks.hollow || large ? 1 : 0.85, symbol,
      color: marks.hollow ? css("--paper") : colour, line: { color: marks.hollow ? colour : css("--paper"), width: marks.hollow ? 2.5 : large ? 1.5 : 0.6 },
    } }];
  }
  const line = { ...common, type: "scatter", mode: marks.x.length > 40 ? "lines" : "lines+markers", line: { color: colour, width: 2, dash }, marker: { size: dash === "solid" ? 5 : 7, color: colour, symbol } };
  const edges = marks.bands?.[bandOf(figure)];
  if (!edges) return [line];
  const edge = { type: "scatter", mode: "lines", x: marks.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false, visible: visible(marks.groups) };
  return [{ ...edge, y: edges[0] }, { ...edge, y: edges[1], fill: "tonexty", fillcolor: faint(colour, selected().length > 4 ? 0.1 : 0.16) }, line];
}

// A heat map: one row per selected method, the first one at the top.
function heatTraces(figure, words, width) {
  const rows = figure.marks.filter((marks) => visible(marks.groups)).reverse();
  const columns = figure.x.labels.length;
  const spread = (marks, values) => { const row = Array(columns).fill(null); marks.x.forEach((x, i) => { row[x] = values[i]; }); return row; };
  const texts = rows.map((marks) => spread(marks, marks.words ? marks.words.map((number) => words[number]) : marks.text));
  // Cells with numbers: of one text colour, at least 4.5 : 1 against every cell.
  const written = (width - 160) / columns > 26, dark = theme() === "dark";
  const scale = written ? (dark ? ["#232b33", "#1f5379", "#2a7ab0"] : ["#eef3f6", "#9cc6e2", "#4a97cb"]) : dark ? ["#232b33", "#1b5e8a", "#8fd0f5"] : ["#eef3f6", "#7fb4d6", "#00507e"];
  return [{
    type: "heatmap", z: rows.map((marks) => spread(marks, marks.y)), x: figure.x.labels.map((_, i) => i), y: rows.map((_, i) => i), xgap: columns > 60 ? 0 : 1, ygap: 1,
    text: texts, customdata: rows.map((marks) => Array(columns).fill(marks.name)), hoverongaps: false, colorscale: scale.map((colour, i) => [i / 2, colour]),
    hovertemplate: `%{customdata}<br>%{text}<br>%{z:.4~g}${figure.value.percent ? "%" : ""}<extra></extra>`, ...(written && { texttemplate: "%{z:.3~g}", textfont: { color: dark ? "#ffffff" : "#0d151b" } }),
    colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: figure.value.percent ? "%" : "", title: { text: figure.value.title, side: "right", font: { size: 11 } }, tickfont: { size: 11 }, nticks: 5 },
  }];
}

// Ticks of a logarithmic axis: 1, 2, 5, 10, 20, … over the range of the values.
function decades(values, few) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) for (const digit of [1, 2, 5]) all.push(digit * 10 ** power);
  const inside = all.filter((value) => value >= low / 1.5 && value <= high * 1.5);
  const kept = inside.length > (few ? 4 : 8) ? inside.filter((value) => Number.isInteger(Math.log10(value))) : inside;
  return { tickvals: kept, ticktext: kept.map((value) => value.toLocaleString("en")) };
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function axis(described, length, values, pixels) {
  const base = { title: { text: described.title ?? "", font: { size: 12 }, standoff: 10 }, gridcolor: css("--grid"), zeroline: false, automargin: true, ticksuffix: described.percent ? "%" : "", type: described.log ? "log" : "linear", linecolor: css("--line") };
  if (described.bare) return { ...base, visible: false };
  if (described.range) base.range = described.log ? described.range.map(Math.log10) : described.range;
  if (described.whole && Math.max(...values) - Math.min(...values) < 9) base.dtick = 1;
  if (!described.labels) return { ...base, ...(described.log && { ...decades(described.range ?? values, length < 6), tickangle: 0 }) };
  const labels = described.labels.map((label) => short(label, 24));
  const step = Math.max(1, Math.ceil(labels.length / length));
  const at = labels.map((_, i) => i).filter((i) => i % step === 0);
  const long = pixels && Math.max(...labels.map((label) => label.length)) * 7 * at.length > pixels;
  return { ...base, tickvals: at, ticktext: at.map((i) => labels[i]), range: [-0.6, labels.length - 0.4], showgrid: labels.length < 60, tickangle: long ? -45 : 0, ticks: "" };
}

// The y axis of rows: only those of selected methods. Returns the axis, and the new place of each row.
function rowsOf(figure) {
  const kept = figure.y.rows.map((group, i) => i).filter((i) => visible([figure.y.rows[i]]));
  const labels = kept.map((i) => figure.y.labels[i]);
  return [{ ...axis({ ...figure.y, labels }, 60, []), showgrid: true }, (row) => kept.indexOf(row)];
}

// Labels at the right ends of lines, moved apart.
function endLabels(figure, height) {
  const lines = figure.marks.filter((marks) => marks.kind === "line" && visible(marks.groups));
  if (lines.length < 2 || lines.length > height / 16) return null;
  const edges = lines.flatMap((marks) => marks.bands?.[bandOf(figure)] ?? [marks.y]).flat().filter((v) => v !== null);
  const pad = 0.04 * (Math.max(...edges) - Math.min(...edges)) || 0.5;
  const range = [Math.min(...edges) - pad, Math.max(...edges) + pad];
  const ends = lines.map((marks) => ({ marks, at: (marks.y.at(-1) - range[0]) / (range[1] - range[0]) })).sort((a, b) => a.at - b.at);
  const gap = 15 / height;
  ends.forEach((end, i) => { end.at = Math.max(end.at, i ? ends[i - 1].at + gap : 0); });
  let top = 1;
  for (const end of ends.toReversed()) { end.at = Math.min(end.at, top); top = end.at - gap; }
  const plain = (marks) => look(marks).symbol === "circle";
  const annotations = ends.map(({ marks, at }) => ({ xref: "paper", yref: "paper", x: 1, y: at, xanchor: "left", yanchor: "middle", xshift: 8, showarrow: false, text: `${plain(marks) ? "" : `${GLYPHS[look(marks).symbol]} `}${short(marks.name, 18)}`, font: { size: 11, color: tone(marks.colour) } }));
  return { range, annotations, margin: 18 + 6.6 * Math.max(...annotations.map((one) => one.text.length)) };
}

// The height without Plotly's buttons; rows of methods that are not selected take no room.
function heightOf(figure, width) {
  if (figure.square) return Math.min(width, figure.x.bare ? 320 : figure.height);
  const missing = figure.row ? figure.y.rows.filter((group) => !visible([group])).length : 0;
  return Math.round((printing ? ON_PAPER : 1) * (figure.height - (figure.row ?? 0) * missing));
}

function draw(element, figure, words = []) {
  const width = element.clientWidth, narrow = width < 420;
  const heat = figure.marks[0]?.kind === "heat";
  const [rows, rowOf] = figure.y.rows ? rowsOf(figure) : [null, null];
  const height = heightOf(figure, width);
  const layout = {
    ...(printing && { width }), height: height + tools(), margin: { l: 8, r: 10, t: 8 + tools(), b: 8 }, hovermode: "closest", barmode: "group", bargap: 0.25,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") }, // Plotly's default is a dark box
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
    hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, align: "left" },
    xaxis: axis(figure.x, width < 260 ? 5 : narrow ? 10 : figure.wide ? 30 : 22, figure.marks.flatMap((marks) => marks.x), width - 120), yaxis: rows ?? axis(figure.y, 34),
  };
  if (heat) Object.assign(layout.xaxis, { showgrid: false, range: [-0.5, figure.x.labels.length - 0.5] }), Object.assign(layout.yaxis, { showgrid: false, range: [-0.5, rows.tickvals.length - 0.5] });
  if (figure.marks.some((marks) => marks.kind === "bars")) layout.xaxis.showgrid = false;
  const ends = narrow ? null : endLabels(figure, height - 60);
  if (ends) { layout.annotations = ends.annotations; layout.margin.r = ends.margin; layout.yaxis.range = ends.range; }
  const largest = figure.marks.reduce((most, marks) => Math.max(most, ...(marks.sizes ?? [1])), 1);
  const scale = Math.min(1, (0.85 * width) / (figure.x.labels?.length ?? 1) / largest); // so that neighbouring dots do not touch
  const data = heat ? heatTraces(figure, words, width) : figure.marks.flatMap((marks) => traces(marks, figure, scale, words, rowOf));
  element.style.minHeight = "";
  plotly().react(element, data, layout, { displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] });
}

function figureOf(figure, section) {
  const element = figures.get(figure.name)?.element ?? make("div", { class: "plot", id: `plot-${figure.name}` });
  element.style.minHeight = `${heightOf(figure, 210) + tools()}px`; // until it is drawn
  figures.set(figure.name, { element, figure: { ...figure, band: section.bands?.[0]?.[0] }, words: section.words, stale: true });
  watcher.observe(element);
  const whole = make("figure", { ...(figure.wide && { class: "wide" }), "data-figure": figure.name }, make("h3", {}, figure.title), element);
  if (figure.key) whole.append(make("p", { class: "key" }, ...figure.key.map((key) => make("span", {}, make("i", { class: key.shape }), key.text))));
  if (figure.note) whole.append(make("figcaption", {}, figure.note));
  whole.hidden = !shows(figure);
  return whole;
}

// Before printing, all figures are drawn at the width of the paper.
function printed(on) {
  printing = on;
  document.documentElement.classList.toggle("printing", on);
  paint();
  for (const known of figures.values()) if (on && known.element.isConnected) drawKnown(known);
}
addEventListener("beforeprint", () => printed(true));
addEventListener("afterprint", () => printed(false));
