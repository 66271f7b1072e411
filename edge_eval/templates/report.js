"use strict";
// The page's behaviour: theme, hints on charts, sorting of tables, and the question browser.
// Texts reach the page through textContent only, each in an element that isolates its direction.

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---- theme: the reader's setting until the button is used; kept where the browser allows it

function setUpTheme() {
  const button = byId("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const store = (value) => {
    try {
      if (value) localStorage.setItem("edge-eval-theme", value);
      return localStorage.getItem("edge-eval-theme");
    } catch {
      return null; // storage is closed to files in some browsers
    }
  };
  const current = () =>
    document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light");
  const label = () => {
    button.textContent = current() === "dark" ? "Light theme" : "Dark theme";
  };
  const kept = store();
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = current() === "dark" ? "light" : "dark";
    store(document.documentElement.dataset.theme);
    label();
  });
  prefersDark.addEventListener("change", label);
  button.hidden = false;
  label();
}

// ---- charts: a mark under the pointer says its values; the table below says them to everyone

function setUpHints() {
  const tip = byId("tip");
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.(".chart [role='graphics-symbol'][aria-label]");
    const text = mark && !mark.closest(".role-axis, .role-legend") && mark.getAttribute("aria-label");
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text.split("; ").join("\n");
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
}

function openForPrint() {
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details.fold, #summary details, #settings details")) fold.open = true;
  });
}

// ---- sorting: a button in each heading, aria-sort on the heading; unknown values stand last

const collator = new Intl.Collator(undefined, { numeric: true });

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b);
}

function sorted(items, keyOf, descending) {
  const keyed = items.map((item) => [keyOf(item), item]);
  const known = keyed.filter(([key]) => key !== null);
  known.sort((a, b) => (descending ? compare(b[0], a[0]) : compare(a[0], b[0])));
  return [...known, ...keyed.filter(([key]) => key === null)].map(([, item]) => item);
}

function makeSortable(headings, onSort) {
  for (const [column, heading] of [...headings].entries()) {
    const button = element("button", { type: "button" }, ...heading.childNodes);
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      onSort(column, descending);
    });
  }
}

function setUpTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    const [body] = table.tBodies;
    const numeric = (column) => table.querySelector(`td.number:nth-child(${column + 1})`) !== null;
    makeSortable(table.tHead.rows[0].cells, (column, descending) => {
      const isNumeric = numeric(column);
      const key = ({ cells }) => {
        const { value } = cells[column].dataset;
        if (value !== undefined) return Number(value);
        return isNumeric ? null : cells[column].textContent;
      };
      body.append(...sorted([...body.rows], key, descending));
    });
  }
}

// ---- the question browser: all questions in memory, one page of them in the document

const PAGE_SIZE = 50;
const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
const LTR = /[A-Za-z\u00c0-\u024f\u0370-\u052f]/;

// One spelling for what readers type in several: without vowel signs and tatweel, alefs alike.
function fold(text) {
  return text
    .normalize("NFKC")
    .replace(/[\u0610-\u061a\u0640\u064b-\u065f\u0670\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, "")
    .replace(/[\u0622\u0623\u0625\u0671]/g, "\u0627")
    .replace(/\u0629/g, "\u0647")
    .replace(/[\u0649\u06cc]/g, "\u064a")
    .toLowerCase();
}

function isRightToLeft(text) {
  for (const character of text) {
    if (RTL.test(character)) return true;
    if (LTR.test(character)) return false;
  }
  return false;
}

function textBlock(text, className) {
  return element("div", { className: `text ${className}`, dir: "auto", lang: "ar" }, text);
}

function setUpBrowser() {
  const data = JSON.parse(byId("data").textContent);
  const all = data.ids.map((_, index) => index);
  const state = { shown: all, page: 0, key: null, descending: false };
  const hasTexts = data.texts.some((text) => text !== null);
  let haystack = null; // built at the first search

  const kind = (index, field) => data.kinds[data.kind[index]][field];
  const GROUP = 0, TASK = 1, LEVEL = 2, COUNTRY = 3;
  const answerOf = (run, index) => run.answers[index];
  const isScored = (run, index) => answerOf(run, index) >= "0" && answerOf(run, index) <= "9";
  const isRight = (run, index) =>
    isScored(run, index) && Number(answerOf(run, index)) === data.answers[index];
  const isAsked = (run, index) => answerOf(run, index) !== "-";
  const nRight = (index) => data.runs.filter((run) => isRight(run, index)).length;
  const nAsked = (index) => data.runs.filter((run) => isAsked(run, index)).length;
  const shareOf = (run, index, option) =>
    run.permille[index] ? run.permille[index][option] / 10 : null;
  const percent = (value) =>
    element("bdi", { dir: "ltr" }, value === null ? "–" : `${value.toFixed(1)} %`);

  // A run's column is sorted by the probability it gave to the right option.
  const columns = [
    { title: "id", key: (index) => data.ids[index] },
    { title: "question", key: (index) => data.texts[index]?.[1] ?? data.n_characters[index] },
    { title: "task", key: (index) => kind(index, TASK) },
    { title: "length", key: (index) => data.n_characters[index] },
    { title: "runs right", key: nRight },
    ...data.runs.map((run) => ({
      title: run.label,
      key: (index) => shareOf(run, index, data.answers[index]),
    })),
  ];

  function answerCell(run, index) {
    const answer = answerOf(run, index);
    if (answer === "-") return element("td", { className: "unscored" }, "not asked");
    if (answer === "i") return element("td", { className: "unscored" }, "invalid");
    if (answer === "l") return element("td", { className: "unscored" }, "too long");
    if (answer === "u") return element("td", { className: "unscored" }, "no letter seen");
    const right = isRight(run, index);
    const mark = element("span", { className: right ? "right" : "wrong" }, right ? "✓ right" : "✗ wrong");
    const cell = element("td", { className: "answer" });
    cell.append(element("bdi", {}, run.letters[answer]), " ", mark, " ", percent(shareOf(run, index, answer)));
    return cell;
  }

  function questionRow(index) {
    const texts = data.texts[index];
    const id = element("bdi", {}, data.ids[index]);
    const rotation = data.rotations[index] ? ` rotated by ${data.rotations[index]}` : "";
    const button = element("button", { type: "button", "aria-expanded": "false" }, id, rotation);
    const row = element("tr", {}, element("th", { scope: "row" }, button));
    const text = texts ? textBlock(texts[1], "clip") : "not at hand";
    row.append(
      element("td", { className: texts ? "question" : "unscored" }, text),
      element("td", { className: "task" }, kind(index, TASK)),
      element("td", { className: "number" }, data.n_characters[index].toLocaleString("en")),
      element("td", { className: "number" }, `${nRight(index)} of ${nAsked(index)}`),
      ...data.runs.map((run) => answerCell(run, index)),
    );
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      row.classList.toggle("open", !open);
      if (open) row.nextElementSibling.remove();
      else row.after(detailRow(index));
    });
    return row;
  }

  function detailRow(index) {
    const [context, question, ...options] = data.texts[index] ?? ["", ""];
    const labels = [GROUP, LEVEL, COUNTRY].map((field) => kind(index, field)).filter(Boolean);
    if (data.flags[index] & 2) labels.push("negated");
    const cell = element("div");
    cell.append(element("p", {}, labels.join(" · ")));
    if (context) cell.append(textBlock(context, "context"));
    if (question) cell.append(textBlock(question, ""));
    cell.append(optionsTable(index, options, isRightToLeft(question) ? "rtl" : "ltr"));
    return element("tr", {}, element("td", { className: "detail", colSpan: columns.length }, cell));
  }

  function optionsTable(index, options, dir) {
    const runs = data.runs.filter((run) => isAsked(run, index));
    const heading = (text) => element("th", { scope: "col" }, element("bdi", {}, text));
    const head = element("tr", {}, heading("letter"), heading("option"));
    head.append(...runs.map((run) => heading(run.label)));
    const body = element("tbody");
    for (let option = 0; option < data.n_options[index]; option += 1) {
      const letters = [...new Set(runs.map((run) => run.letters[option]))].join(" / ");
      const isKey = option === data.answers[index];
      const row = element("tr", { className: isKey ? "key" : "" });
      row.append(element("th", { scope: "row" }, element("bdi", {}, letters)));
      const text = options.length ? textBlock(options[option], "") : "not at hand";
      row.append(element("td", {}, text, isKey ? element("bdi", { className: "right" }, "✓ the right answer") : ""));
      for (const run of runs) row.append(probabilityCell(run, index, option));
      body.append(row);
    }
    const times = runs.map((run) => {
      const time = run.ms[index] === null ? "not timed" : `${run.ms[index].toLocaleString("en")} ms`;
      const length = run.n_tokens[index] === null ? "" : `${run.n_tokens[index]} tokens, `;
      return element("td", {}, element("bdi", { dir: "ltr" }, length + time));
    });
    const foot = element("tr", {}, element("th", { scope: "row", colSpan: 2 }, element("bdi", {}, "one forward pass")), ...times);
    const words = "Options and the probability each run gave them, among the letters offered";
    const caption = element("caption", {}, element("bdi", { dir: "ltr" }, words));
    const table = element("table", {}, caption, element("thead", {}, head), body, element("tfoot", {}, foot));
    return element("div", { className: "scroll", dir }, table); // scrolled to where reading begins
  }

  function probabilityCell(run, index, option) {
    const share = shareOf(run, index, option);
    const bar = element("i");
    bar.style.setProperty("--share", (share ?? 0) / 100);
    bar.style.setProperty("--color", `var(--run-${(data.runs.indexOf(run) % data.n_colors) + 1})`);
    const meter = element("span", { className: "meter", "aria-hidden": "true" }, bar);
    const chosen = answerOf(run, index) === String(option);
    return element("td", { className: "answer" }, meter, " ", percent(share), chosen ? element("bdi", { className: "chosen" }, "chosen") : "");
  }

  function outcomeFilter(value) {
    const [outcome, run] = value.split(" ");
    const of = data.runs[run];
    return {
      "": () => true,
      "all-right": (index) => nRight(index) === data.runs.length,
      "all-wrong": (index) => nRight(index) === 0,
      differ: (index) => nRight(index) > 0 && nRight(index) < nAsked(index),
      right: (index) => isRight(of, index),
      wrong: (index) => isScored(of, index) && !isRight(of, index),
      unscored: (index) => !isScored(of, index),
    }[outcome];
  }

  function filter() {
    const words = fold(byId("search").value).split(/\s+/).filter(Boolean);
    if (words.length && !haystack) {
      haystack = all.map((index) => fold([data.ids[index], ...(data.texts[index] ?? [])].join("\n")));
    }
    const outcome = outcomeFilter(byId("outcome").value);
    const fields = [["group", GROUP], ["task", TASK], ["level", LEVEL], ["country", COUNTRY]];
    const wanted = fields.map(([id, field]) => [byId(id).value, field]).filter(([value]) => value);
    const flag = { "": 0, context: 1, negated: 2 }[byId("kind").value];
    const found = all.filter(
      (index) =>
        wanted.every(([value, field]) => (kind(index, field) || "none") === value) &&
        (data.flags[index] & flag) === flag &&
        outcome(index) &&
        words.every((word) => haystack[index].includes(word)),
    );
    state.shown = state.key ? sorted(found, state.key, state.descending) : found;
    state.page = 0;
    render();
  }

  function render() {
    const n = state.shown.length;
    const start = state.page * PAGE_SIZE;
    const rows = state.shown.slice(start, start + PAGE_SIZE);
    byId("browser").tBodies[0].replaceChildren(...rows.map(questionRow));
    const range = n ? `${start + 1} to ${start + rows.length} of ` : "";
    const total = all.length.toLocaleString("en");
    const found = n === all.length ? "" : `${n.toLocaleString("en")} found, of `;
    byId("count").textContent = `${range}${found}${total} questions`;
    byId("page").textContent = `Page ${state.page + 1} of ${Math.max(Math.ceil(n / PAGE_SIZE), 1)}`;
    byId("previous").disabled = state.page === 0;
    byId("next").disabled = start + PAGE_SIZE >= n;
  }

  function turn(pages) {
    state.page += pages;
    render();
    byId("count").scrollIntoView({ block: "nearest" });
  }

  for (const [id, field] of [["group", GROUP], ["task", TASK], ["level", LEVEL], ["country", COUNTRY]]) {
    const values = new Set(data.kinds.map((labels) => labels[field] || "none"));
    byId(id).append(...[...values].sort(collator.compare).map((value) => element("option", { value }, value)));
  }
  const head = element("tr", {}, ...columns.map(({ title }) => element("th", { scope: "col" }, element("bdi", {}, title))));
  byId("browser").tHead.append(head);
  makeSortable(head.cells, (column, descending) => {
    state.key = columns[column].key;
    state.descending = descending;
    state.shown = sorted(state.shown, state.key, descending);
    state.page = 0;
    render();
  });
  let waiting;
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 120);
  });
  // Leaving the search field changes nothing: rows made anew would lose the click that left it.
  for (const select of byId("filters").querySelectorAll("select")) select.addEventListener("change", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(filter));
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  if (!hasTexts) byId("search").placeholder = "id";
  for (const id of ["filters", "browser", "pager"]) byId(id).hidden = false;
  render();
}

setUpTheme();
setUpHints();
openForPrint();
setUpTables();
setUpBrowser();
