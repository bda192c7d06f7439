// What is shown: the selected methods, other switches, choices and sorting. The address keeps it, so that a link
// reproduces the view: #clients&methods=fedavg,fedprox&curves=auc&band=seeds&sort=results:2:-1
const hidden = new Set(); // groups that are switched off
const sorted = new Map(); // table → [column, direction]
const picked = new Map(); // section → chosen measure
let band = null; // chosen band of the curves; null: the section's first
let section = ""; // the section that a link leads to
let current = null; // the page that is shown
let fresh = true; // whether no page has been shown yet
let own = false; // whether the user has selected methods: otherwise a live page follows the best ones

const visible = (groups = []) => !groups.some((group) => hidden.has(group));
const methods = () => current?.legend ?? [];
const topGroups = () => new Set(current?.top ?? methods().map((entry) => entry.group));
const selected = () => methods().filter((entry) => !hidden.has(entry.group));

function select(groups) {
  own = true;
  for (const entry of methods()) groups.has(entry.group) ? hidden.delete(entry.group) : hidden.add(entry.group);
  changed();
}

// Apply a change of the selection or of another switch to the whole page.
function changed() {
  remember();
  showSelection();
  fillTables();
  redraw();
}

const isTop = () => { const top = topGroups(); return methods().every((entry) => top.has(entry.group) !== hidden.has(entry.group)); };

function remember() {
  const parts = [section];
  if (methods().length && !isTop()) parts.push(`methods=${selected().length === methods().length ? "*" : selected().map((entry) => encodeURIComponent(entry.name)).join(",")}`);
  const others = [...hidden].filter((group) => !group.startsWith("method:"));
  if (others.length) parts.push(`off=${others.map(encodeURIComponent).join(",")}`);
  for (const [name, value] of picked) parts.push(`${name}=${encodeURIComponent(value)}`);
  if (band !== null) parts.push(`band=${band}`);
  for (const [name, [column, direction]] of sorted) parts.push(`sort=${name}:${column}:${direction}`);
  history.replaceState(null, "", parts.length > 1 || section ? `#${parts.join("&")}` : location.href.split("#")[0]);
}

// Read the address; called when the first page is known, and when the user changes the address.
function recall() {
  const [place, ...rest] = location.hash.slice(1).split("&");
  const names = (text) => text.split(",").filter(Boolean).map(decodeURIComponent);
  let wanted = topGroups();
  for (const collection of [hidden, sorted, picked]) collection.clear();
  band = null;
  own = false;
  section = place;
  for (const [name, value] of rest.map((part) => part.split("="))) {
    if (value === undefined) continue;
    else if (name === "methods") { own = true; const kept = new Set(names(value)); wanted = new Set(methods().filter((entry) => value === "*" || kept.has(entry.name)).map((entry) => entry.group)); }
    else if (name === "off") names(value).forEach((group) => hidden.add(group));
    else if (name === "band") band = value;
    else if (name === "sort") { const [table, column, direction] = value.split(":"); sorted.set(table, [Number(column), Number(direction)]); }
    else picked.set(name, decodeURIComponent(value));
  }
  selectInitially(wanted);
}

const selectInitially = (groups) => methods().forEach((entry) => groups.has(entry.group) ? hidden.delete(entry.group) : hidden.add(entry.group));
