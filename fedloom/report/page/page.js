// The page: from its data, which is embedded in a report or fetched from the server of a live page.
let shown = "";

function switches(entries) {
  return entries.map((entry) => {
    const button = make("button", { type: "button", class: "switch", "data-group": entry.group, "aria-pressed": String(!hidden.has(entry.group)), style: `--colour: ${entry.colour}`, title: "click: hide or show; double-click: show only this one" }, entry.name);
    const others = entries.filter((other) => other !== entry).map((other) => other.group);
    button.addEventListener("click", () => { hidden.has(entry.group) ? hidden.delete(entry.group) : hidden.add(entry.group); changed(); });
    button.addEventListener("dblclick", () => {
      const alone = others.every((group) => hidden.has(group));
      hidden.delete(entry.group);
      for (const group of others) alone ? hidden.delete(group) : hidden.add(group);
      changed();
    });
    return button;
  });
}

// The figures of a section that belong to the chosen value of its list.
function figuresOf(section) {
  const values = (section.choices ?? []).map(([value]) => value);
  const value = values.includes(picked.get(section.name)) ? picked.get(section.name) : values[0];
  return (section.figures ?? []).filter((figure) => !figure.choice || !values.length || figure.choice === value);
}

function chooser(title, choices, value, choose) {
  const all = make("select", { "aria-label": title }, ...choices.map(([value, name]) => make("option", { value }, name)));
  if (choices.some(([known]) => known === value)) all.value = value;
  all.addEventListener("change", () => choose(all.value));
  return make("label", { class: "choice" }, `${title} `, all);
}

// Figures side by side; small ones that belong together have a title and a note in common.
function grids(section) {
  const groups = [];
  for (const figure of figuresOf(section)) {
    if (!groups.length || groups.at(-1)[0].family !== figure.family) groups.push([]);
    groups.at(-1).push(figure);
  }
  return groups.map((group) => {
    const grid = make("div", { class: group.every((figure) => figure.square) ? "grid small" : "grid" }, ...group.map((figure) => figureOf(figure, section)));
    const { family, family_note: note } = group[0];
    return family ? make("div", { class: "family" }, make("h3", {}, family), grid, ...(note ? [make("p", { class: "note" }, note)] : [])) : grid;
  });
}

function sectionOf(section) {
  const whole = make("section", { id: section.name }, make("h2", {}, section.title));
  if (section.text) whole.append(make("p", { class: "lead" }, section.text));
  if (section.missing) whole.append(make("p", { class: "missing" }, section.missing));
  whole.append(...(section.tables ?? []).map(tableOf));
  const above = [];
  if (section.choices && section.figures) above.push(chooser("measure", section.choices, picked.get(section.name), (value) => { picked.set(section.name, value); remember(); show(current); }));
  if (section.bands) above.push(chooser("band", section.bands, band, (value) => { band = value; changed(); }));
  if (section.figures) above.push(...switches(section.legend ?? []));
  if (above.length) whole.append(make("div", { class: "legend" }, ...above));
  if (section.figures?.some(needsLegend)) whole.append(make("div", { class: "methods" }));
  whole.append(...grids(section));
  whole.append(...(section.texts ?? []).map(([title, text]) => make("details", {}, make("summary", {}, title), make("pre", {}, text))));
  return whole;
}

function show(page) {
  current = page;
  if (fresh && page.sections) recall(); else if (!own) selectInitially(topGroups());
  const place = [scrollX, scrollY];
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  document.title = page.title;
  byId("title").textContent = page.title;
  byId("facts").replaceChildren(...(page.facts ?? []).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  say(page.state, page.running ? "running" : page.unfinished ? "ended" : "");
  const gone = new Set(figures.keys());
  tables.clear();
  const sections = (page.sections ?? []).map(sectionOf);
  for (const section of page.sections ?? []) for (const figure of figuresOf(section)) gone.delete(figure.name);
  for (const name of gone) { const { element } = figures.get(name); watcher.unobserve(element); window.Plotly?.purge(element); figures.delete(name); }
  byId("page").replaceChildren(...sections);
  for (const summary of document.querySelectorAll("summary")) summary.parentElement.open = open.has(summary.textContent);
  showMethods();
  showSections(page.sections ?? []);
  paint();
  if (fresh && page.sections && section) go(); else scrollTo(...place);
  fresh = fresh && !page.sections;
}
addEventListener("hashchange", () => { if (current?.sections) { fresh = true; show(current); } });

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
