// The sidebar: links to sections, and the selection of methods. On a narrow screen it is a bar with a menu.
const search = make("input", { type: "search", placeholder: "Search methods", "aria-label": "search methods", autocomplete: "off", spellcheck: "false" });
const list = make("ul");
const count = make("p", { class: "count" });
const buttons = make("div", { class: "buttons" });
search.addEventListener("input", showSelection);

const matches = (entry) => search.value.toLowerCase().split(/\s+/).every((word) => entry.name.toLowerCase().includes(word));
const groupsOf = (entries) => new Set(entries.map((entry) => entry.group));

function item(entry) {
  const box = make("input", { type: "checkbox", "data-group": entry.group });
  box.checked = !hidden.has(entry.group);
  box.addEventListener("change", () => { own = true; box.checked ? hidden.delete(entry.group) : hidden.add(entry.group); changed(); });
  const only = make("button", { type: "button", class: "only", "aria-label": `show only ${entry.name}` }, "only");
  only.addEventListener("click", () => select(new Set([entry.group])));
  const name = make("span", { class: "name", title: entry.name }, entry.name);
  const label = make("label", {}, box, swatch(entry), name);
  if (entry.badge) label.append(make("span", { class: "badge", title: entry.badge }, entry.badge));
  return make("li", {}, label, only);
}

function showMethods() {
  byId("methods").replaceChildren(...(methods().length ? [make("h2", {}, "Methods"), search, buttons, count, list] : []));
  list.replaceChildren(...methods().map(item));
  showSelection();
}

function action(text, title, entries) {
  const button = make("button", { type: "button", class: "pill", title }, text);
  button.addEventListener("click", () => select(groupsOf(entries())));
  return button;
}

// Show in the sidebar, the legends and the figures what is selected.
function showSelection() {
  const all = methods(), found = all.filter(matches);
  all.forEach((entry, i) => {
    const row = list.children[i];
    if (!row) return;
    row.hidden = !found.includes(entry);
    row.querySelector("input").checked = !hidden.has(entry.group);
  });
  const top = all.filter((entry) => topGroups().has(entry.group));
  buttons.replaceChildren(
    ...(search.value ? [action("only these", "select the methods that were found", () => found)] : []),
    ...(current?.top ? [action(`top ${top.length}`, "select the best methods", () => top)] : []),
    action("all", "select all methods", () => all), action("none", "select no method", () => []),
  );
  count.textContent = `${selected().length} of ${all.length} shown`;
  for (const button of document.querySelectorAll(".switch")) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.group)));
  for (const legend of document.querySelectorAll(".methods")) legend.replaceChildren(...selected().map((entry) => make("span", {}, swatch(entry), entry.name)));
  for (const element of document.querySelectorAll("figure[data-figure]")) { const known = figures.get(element.dataset.figure); if (known) element.hidden = !shows(known.figure); }
}

function showSections(sections) {
  byId("sections").replaceChildren(...sections.map((one) => {
    const link = make("a", { href: `#${one.name}` }, one.title);
    link.addEventListener("click", (event) => { event.preventDefault(); section = one.name; remember(); go(); closeMenu(); });
    return link;
  }));
  follow();
}

const go = () => byId(section)?.scrollIntoView({ block: "start" });

// Highlight the section that is being read: the last one whose top is above a third of the screen.
function follow() {
  const all = [...document.querySelectorAll("main > section")];
  const ended = scrollY > 0 && innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  const above = all.filter((one) => one.getBoundingClientRect().top < innerHeight / 3);
  const here = (ended ? all.at(-1) : above.at(-1) ?? all[0])?.id;
  for (const link of byId("sections").children) link.toggleAttribute("aria-current", link.getAttribute("href") === `#${here}`);
}
addEventListener("scroll", follow, { passive: true });

function closeMenu() { document.documentElement.classList.remove("open"); byId("menu").setAttribute("aria-expanded", "false"); }
byId("menu").addEventListener("click", () => byId("menu").setAttribute("aria-expanded", String(document.documentElement.classList.toggle("open"))));
