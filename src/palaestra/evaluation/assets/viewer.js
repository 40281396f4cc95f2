"use strict";
// Everything that a model or a page wrote enters the document through textContent and attributes set one by one.
(() => {
  const byId = (id) => document.getElementById(id);
  const parsed = (id) => JSON.parse(byId(id).textContent);
  const facts = parsed("facts");
  const episodes = facts.episodes;
  const OUTCOMES = {
    success: ["✓", "solved"], failure: ["✗", "not solved"], truncated: ["…", "step limit"],
    unreadable: ["?", "unreadable"], environment_failed: ["!", "environment failed"],
  };
  const SVG = "http://www.w3.org/2000/svg";
  let shown = [], current = -1, turn = -1, watcher = null, comparing = false;
  const groups = new Map();
  episodes.forEach(({siblings}, place) => groups.set(siblings, [...(groups.get(siblings) || []), place]));

  function el(tag, set, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(set || {})) {
      if (name === "text") made.textContent = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  const number = (value) => typeof value !== "number" ? String(value)
    : Number.isInteger(value) ? String(value) : String(Math.round(value * 1000) / 1000);
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  const signed = (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`;
  const isSolved = (episode) => episode.outcome === "success";
  const isUnsolved = (episode) => !isSolved(episode) && episode.outcome !== "environment_failed";
  const versionsOf = ([low, high]) => low < 0 ? "none" : low === high ? String(low) : `${low} to ${high}`;

  // ---------------------------------------------------------------- the list

  function fill(select, first, values) {
    select.append(el("option", {value: "", text: first}));
    for (const [value, text] of values) select.append(el("option", {value, text}));
  }

  function tally(of) {
    const counts = new Map();
    for (const episode of episodes) counts.set(of(episode), (counts.get(of(episode)) || 0) + 1);
    return counts;
  }

  function prepareFilters() {
    const tasks = [...tally((e) => e.task)].sort(([a], [b]) => a < b ? -1 : 1);
    fill(byId("task"), `All ${plural(tasks.length, "task")}`, tasks.map(([task, n]) => [task, `${task} (${n})`]));
    const outcomes = tally((e) => e.outcome);
    const unsolved = episodes.filter(isUnsolved).length;
    fill(byId("outcome"), "Any outcome", [...(unsolved ? [["unsolved", `not solved, in any way (${unsolved})`]] : []),
      ...Object.entries(OUTCOMES).filter(([name]) => outcomes.has(name))
        .map(([name, [, words]]) => [name, `${words} (${outcomes.get(name)})`])]);
    const labels = [...tally((e) => e.label)];
    fill(byId("label"), "All policies", labels.map(([label, n]) => [label, `${label} (${n})`]));
    byId("label").hidden = labels.length < 2;
    const versions = new Set();
    for (const {versions: [low, high]} of episodes) if (low >= 0) { versions.add(low); versions.add(high); }
    fill(byId("version"), "Any version", [...versions].sort((a, b) => a - b).map((v) => [v, `version ${v}`]));
    byId("version").hidden = versions.size < 2;
    for (const id of ["label", "task", "outcome", "version"]) byId(id).addEventListener("change", filter);
    byId("search").addEventListener("input", filter);
  }

  function prepareList() {
    const rows = document.createDocumentFragment();
    const severalTasks = episodes.some((episode) => episode.task !== episodes[0].task);
    episodes.forEach((episode, place) => {
      const [sign, words] = OUTCOMES[episode.outcome];
      episode.found = [episode.id, episode.label, episode.task, `seed ${episode.seed}`, episode.instruction, episode.reason,
        episode.written].join("\n").toLowerCase();
      episode.row = el("button", {class: "row", type: "button", onclick: () => open(place)},
        el("span", {class: `badge ${episode.outcome}`, text: sign, title: words, "aria-label": words}),
        el("span", {class: "title", text: episode.instruction || episode.task, title: episode.instruction}),
        el("span", {class: "number", text: number(episode.reward), title: "reward"}),
        el("span", {class: "about", title: episode.id,
          // In the order of interest: the end of a long line is cut.
          text: [episode.label, plural(episode.steps, "step"), severalTasks && episode.task,
            episode.versions[0] < 0 ? "" : `version ${versionsOf(episode.versions)}`, `seed ${episode.seed}`].filter(Boolean).join(" · ")}));
      episode.item = el("li", null, episode.row);
      rows.append(episode.item);
    });
    byId("list").append(rows);
  }

  function filter() {
    const task = byId("task").value, outcome = byId("outcome").value, version = byId("version").value;
    const label = byId("label").value;
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = [];
    let counted = 0, solved = 0;
    episodes.forEach((episode, place) => {
      const fits = (!task || episode.task === task) && (!label || episode.label === label)
        && (!outcome || (outcome === "unsolved" ? isUnsolved(episode) : episode.outcome === outcome))
        && (version === "" || (episode.versions[0] <= +version && +version <= episode.versions[1]))
        && words.every((word) => episode.found.includes(word));
      if (episode.item.hidden === fits) episode.item.hidden = !fits;
      if (!fits) return;
      shown.push(place);
      if (episode.outcome !== "environment_failed") { counted += 1; solved += episode.outcome === "success"; }
    });
    const rate = counted ? ` · ${(100 * solved / counted).toFixed(1)} % of ${counted.toLocaleString("en")} solved` : "";
    byId("count").textContent = `${shown.length.toLocaleString("en")} of ${plural(episodes.length, "episode")}${rate}`;
  }

  // ---------------------------------------------------------------- pictures

  function source(place) {
    if (facts.beside) return `${encodeURIComponent(facts.beside)}/${facts.files[place]}`;
    return `data:image/${facts.pictures[place]};base64,${byId(`p${place}`).textContent}`;
  }

  function lost(words) { return el("div", {class: "lost", text: words}); }

  // A picture is decoded when it comes near the window, and not before.
  function picture(place, words) {
    if (!(place >= 0)) return lost("This picture was not kept.");
    const made = el("img", {alt: words, "data-place": place, decoding: "async"});
    made.addEventListener("error", () => made.replaceWith(lost("This picture cannot be shown.")));
    watcher.observe(made);
    return made;
  }

  function watch() {
    if (watcher) watcher.disconnect();
    watcher = new IntersectionObserver((seen) => {
      for (const {target, isIntersecting} of seen) {
        if (!isIntersecting) continue;
        watcher.unobserve(target);
        target.src = source(+target.dataset.place);
      }
    }, {root: null, rootMargin: "1500px"});
  }

  // `size` is the screen in pixels, the unit of actions. The picture may be drawn at another size.
  function screen(place, size, drawing, words, scale = 2) {
    const frame = el("div", {class: "screen"}), made = picture(place, words);
    frame.append(made);
    const lay = (width, height) => {
      if (made.tagName === "IMG") {
        made.setAttribute("width", width < 340 ? width * scale : width);
        made.setAttribute("height", width < 340 ? height * scale : height);
      }
      if (drawing && made.tagName === "IMG") frame.append(drawing(width, height));
    };
    if (size) lay(...size);
    else made.addEventListener("load", () => lay(made.naturalWidth, made.naturalHeight), {once: true});
    return frame;
  }

  // ---------------------------------------------------------------- what was done, drawn

  function path(into, d, guess) {
    for (const layer of ["under", "over"]) {
      const made = document.createElementNS(SVG, "path");
      made.setAttribute("d", d);
      made.setAttribute("class", guess && layer === "over" ? "over guess" : layer);
      into.append(made);
    }
  }

  const ring = (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;

  function arrow(x1, y1, x2, y2, head) {
    const along = Math.atan2(y2 - y1, x2 - x1);
    const wing = (turned) => `${x2 - head * Math.cos(along + turned)} ${y2 - head * Math.sin(along + turned)}`;
    return `M${x1} ${y1}L${x2} ${y2}M${wing(0.5)}L${x2} ${y2}L${wing(-0.5)}`;
  }

  // `pointer` is where the mouse was left; a click without a place happens there.
  function drawing(action, pointer) {
    if (!["click", "move", "drag", "scroll"].includes(action.kind)) return null;
    return (width, height) => {
      const unit = Math.max(width, height) / 40;
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("preserveAspectRatio", "none");
      svg.dataset.kind = action.kind;
      if (action.kind === "drag") {
        const points = action.path || [], last = points.length - 1;
        const way = points.slice(0, last).map((point, i) => `${i ? "L" : "M"}${point}`).join("");
        if (last > 0) path(svg, ring(...points[0], 0.5 * unit) + way + arrow(...points[last - 1], ...points[last], 1.2 * unit));
        return svg;
      }
      // The middle of a pixel, where the mouse really is.
      const guess = !action.at, [x, y] = (action.at || pointer || [width / 2, height / 2]).map((v) => v + 0.5);
      if (action.kind === "scroll") {
        const far = Math.hypot(action.dx, action.dy) || 1, reach = Math.min(Math.max(far, 4 * unit), 10 * unit);
        path(svg, arrow(x, y, x + action.dx / far * reach, y + action.dy / far * reach, 1.4 * unit), guess);
      } else {
        const r = action.kind === "move" ? 0.5 * unit : unit;
        let d = ring(x, y, r) + `M${x - 2 * unit} ${y}h${unit}M${x + unit} ${y}h${unit}M${x} ${y - 2 * unit}v${unit}M${x} ${y + unit}v${unit}`;
        if (action.times > 1) d += ring(x, y, 0.5 * r);
        if (action.times > 2) d += ring(x, y, 0.2 * r);
        path(svg, d, guess);
      }
      return svg;
    };
  }

  function pointerAfter(action, pointer) {
    if (!action) return pointer;
    if (action.kind === "drag" && action.path && action.path.length) return action.path[action.path.length - 1];
    return ["click", "move", "scroll"].includes(action.kind) && action.at ? action.at : pointer;
  }

  // ---------------------------------------------------------------- what was written

  const visible = (text) => text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");

  function spread(runs) {
    return runs.flatMap(([value, times]) => Array(times).fill(value));
  }

  function tokens(one) {
    const versions = spread(one.versions);
    const readout = el("p", {class: "label", role: "status"});
    const strip = el("div", {class: facts.by_id ? "tokens ids" : "tokens"});
    let asked = null;
    one.tokens.forEach((word, place) => {
      const text = facts.words[word], known = one.log_probs[place];
      const chance = known === null ? 0 : Math.exp(known);
      const say = `token ${place + 1} of ${one.tokens.length}: probability ${known === null ? "0" : chance.toPrecision(3)}`
        + `, log ${known === null ? "−∞" : known.toFixed(3)}, version ${versions[place]}`;
      const ends = /^<\|?.*\|?>$/s.test(text);
      const made = el("span", {class: ends ? "token end" : "token", text: visible(text) || "∅", title: say,
        onclick: () => { if (asked) asked.classList.remove("asked"); asked = made; made.classList.add("asked"); readout.textContent = say; }});
      made.style.setProperty("--d", (0.75 * (1 - chance)).toFixed(3));
      strip.append(made);
    });
    return [strip, readout];
  }

  function chances(one) {
    const known = one.log_probs.filter((value) => value !== null);
    if (!known.length) return "";
    const mean = Math.exp(known.reduce((a, b) => a + b, 0) / known.length);
    return `, probability ${mean.toPrecision(2)} each (geometric mean), at least ${Math.exp(Math.min(...known)).toPrecision(2)}`;
  }

  function prompt(one) {
    const length = one.prompt.reduce((sum, [, times]) => sum + times, 0);
    const made = el("details", null,
      el("summary", {text: `Prompt, masked: ${plural(length, "token")}, ${plural(one.pictures.length, "picture")}`}));
    made.addEventListener("toggle", () => {
      const body = el("div", {class: facts.by_id ? "prompt ids" : "prompt"});
      for (const [word, times] of one.prompt) {
        body.append(el("span", {class: "run", text: visible(facts.words[word])}, times > 1 ? el("b", {text: ` ×${times} `}) : null));
      }
      made.append(body);
    }, {once: true});
    return made;
  }

  // ---------------------------------------------------------------- one episode

  // The advantage of a turn in the loss, and its value before the update; only of episodes that were learned from.
  function credit(full, place) {
    const known = full.credit;
    if (!known) return [];
    const advantage = known.advantages[place], value = known.values[place];
    const sign = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
    return [
      typeof advantage === "number" ? el("span", {class: `credit ${sign}`, text: `advantage ${signed(advantage)}`,
        title: "Above zero, the update made this reply more likely; below, less likely."}) : null,
      typeof value === "number" ? el("span", {text: `value ${number(value)}`, title: "What the model expected before the update."}) : null,
    ];
  }

  function card(full, place, size, pointer) {
    const one = full.turns[place];
    const earlier = one.pictures.slice(0, -1), seen = one.sizes[one.sizes.length - 1];
    const left = el("div", null,
      el("div", {class: "top"}, el("h3", {text: `Turn ${place + 1}`}), el("span", {text: `reward ${number(one.reward)}`}), ...credit(full, place),
        el("span", {text: `version ${one.versions.map(([v, n]) => one.versions.length > 1 ? `${v} ×${n}` : v).join(", ") || "none"}`}),
        seen ? el("span", {text: `seen at ${seen[0]} × ${seen[1]}`}) : null),
      one.pictures.length
        ? screen(one.pictures[one.pictures.length - 1], size, one.action && drawing(one.action, pointer), `The screen at turn ${place + 1}`)
        : lost("No picture was shown."));
    if (earlier.length) {
      left.append(el("div", {class: "before"}, el("span", {text: "Also in the prompt:"}),
        ...earlier.map((p, i) => picture(p, `Earlier screen ${i + 1}`))));
    }
    const right = el("div", null,
      one.action ? el("p", {class: "said", text: one.words})
        : el("p", {class: "said wrong", text: `Could not be read: ${one.unreadable}`}),
      facts.by_id || !one.tokens.length ? el("p", {class: "label", text: "What the model wrote"}) : null,
      facts.by_id || !one.tokens.length ? el("div", {class: "text", text: one.text || "(nothing)"}) : null,
      el("p", {class: "label", text: `Sampled: ${plural(one.tokens.length, "token")}${chances(one)}`}),
      ...(one.tokens.length ? tokens(one) : []),
      prompt(one));
    return el("section", {class: "turn", "data-turn": place}, left, right);
  }

  // Names and values of parameters as words; those without a value are left out.
  function pairs(values) {
    return Object.entries(values).filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
  }

  function backButton() {
    return el("button", {class: "back", type: "button", text: "← all episodes", onclick: () => { document.body.dataset.view = "list"; }});
  }

  function fact(name, value) {
    return value === null || value === undefined || value === "" ? null
      : el("div", null, el("dt", {text: name}), el("dd", {text: String(value)}));
  }

  // ---------------------------------------------------------------- episodes of the same group or seed

  const siblingsOf = (place) => groups.get(episodes[place].siblings) || [];

  const totalAdvantage = (full) => {
    const known = full.credit ? full.credit.advantages.filter((value) => typeof value === "number") : [];
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };

  function siblingStrip(place, compared) {
    const members = siblingsOf(place);
    if (members.length < 2) return null;
    const solved = members.filter((member) => isSolved(episodes[member])).length;
    return el("div", {class: "siblings"},
      el("span", {class: "label", text: `Played ${members.length} times from the same first screen, ${solved} solved:`}),
      ...members.map((member, i) => {
        const [sign, words] = OUTCOMES[episodes[member].outcome];
        return el("button", {class: "chip", type: "button", "aria-current": !compared && member === place ? "true" : null,
          title: `${words}, reward ${number(episodes[member].reward)}`, onclick: () => open(member)},
          el("span", {class: `badge ${episodes[member].outcome}`, text: sign}), ` ${episodes[member].label || i + 1}`);
      }),
      compared ? el("button", {class: "chip act", type: "button", text: "one at a time", onclick: () => open(place)})
        : el("button", {class: "chip act", type: "button", text: "side by side", onclick: () => compare(place)}));
  }

  function column(member, number_) {
    const episode = episodes[member], full = parsed(`t${member}`), [sign, words] = OUTCOMES[episode.outcome];
    const size = full.width && full.height ? [full.width, full.height] : null, advantage = totalAdvantage(full);
    const made = el("section", {class: "column"},
      el("button", {class: "columnhead", type: "button", onclick: () => open(member), title: "Open this episode"},
        el("span", {class: `badge ${episode.outcome}`, text: `${sign} ${words}`}),
        el("span", {class: "label", text: [episode.label || `episode ${number_}`, `reward ${number(episode.reward)}`].join(" · ")}),
        advantage === null ? null : el("span", {class: `credit ${advantage > 0 ? "up" : advantage < 0 ? "down" : ""}`,
          text: `advantage ${signed(advantage)}`})));
    let pointer = null;
    full.turns.forEach((one, i) => {
      const at = one.pictures.length ? one.pictures[one.pictures.length - 1] : -1;
      made.append(el("figure", null, screen(at, size, one.action && drawing(one.action, pointer), `The screen at turn ${i + 1}`, 1.5),
        el("figcaption", {class: one.action ? "" : "wrong", text: `${i + 1}. ${one.action ? one.words : `could not be read: ${one.unreadable}`}`})));
      pointer = pointerAfter(one.action, pointer);
    });
    if (full.last !== null) {
      made.append(el("figure", null, screen(full.last, size, null, "The last screen", 1.5), el("figcaption", {text: "after the last action"})));
    }
    return made;
  }

  function compare(place) {
    const members = siblingsOf(place), episode = episodes[place], main = byId("episode");
    if (members.length < 2) return;
    watch();
    main.replaceChildren(el("div", {class: "head"}, backButton(),
      el("h2", {text: episode.instruction || episode.task}),
      el("p", {class: "sub", text: `${episode.task} · seed ${episode.seed}`}), siblingStrip(place, true)),
    el("div", {class: "columns"}, ...members.map((member, i) => column(member, i + 1))));
    choosePlace(place);
    comparing = true;
    remember();
  }

  function head(place, full) {
    const episode = episodes[place], [sign, words] = OUTCOMES[episode.outcome];
    const params = pairs(full.params), verifier = pairs(full.detail);
    // "step limit: the task's step limit" says it twice.
    const why = episode.reason && !episode.reason.endsWith(words) ? `: ${episode.reason}` : "";
    return el("div", {class: "head"},
      backButton(),
      el("h2", {text: episode.instruction || episode.task}),
      el("p", {class: "sub", text: [episode.task, `seed ${episode.seed}`, params].filter(Boolean).join(" · ")}),
      el("p", {class: `badge ${episode.outcome}`, text: `${sign} ${words}${why}`}),
      siblingStrip(place, false),
      el("dl", {class: "facts"},
        episode.label ? fact("policy", episode.label) : null,
        fact("reward", number(episode.reward)),
        fact("turns", `${episode.steps}${full.step_limit ? ` of at most ${full.step_limit}` : ""}`),
        fact("policy version", versionsOf(episode.versions)),
        full.credit ? fact("learned from in the update to version", full.credit.version) : null,
        fact("seconds", number(episode.seconds)),
        el("div", null, el("dt", {text: "token colour"}), el("dd", null, "unlikely", el("span", {class: "scale"}), "certain; point or tap for the number"))),
      el("details", {class: "more"}, el("summary", {text: "Session, sampling and verifier"}), el("dl", {class: "facts"},
        fact("temperature", number(full.temperature)), fact("codec", full.codec), fact("group", full.group),
        fact("broken sessions before", full.attempt || ""), fact("session", full.session), fact("episode", episode.id),
        fact("started", full.started_at ? new Date(full.started_at * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : ""),
        fact("verifier", verifier))));
  }

  function open(place, at) {
    const episode = episodes[place], full = parsed(`t${place}`), main = byId("episode");
    const size = full.width && full.height ? [full.width, full.height] : null;
    watch();
    main.replaceChildren(head(place, full));
    let pointer = null;
    full.turns.forEach((one, i) => {
      main.append(card(full, i, size, pointer));
      pointer = pointerAfter(one.action, pointer);
    });
    if (full.last !== null) {
      main.append(el("section", {class: "turn"}, el("div", null,
        el("div", {class: "top"}, el("h3", {text: "After the last action"})), screen(full.last, size, null, "The last screen"))));
    }
    if (!full.turns.length && full.last === null) main.append(el("p", {class: "empty", text: "This episode has no turns."}));
    choosePlace(place);
    if (at) choose(at - 1);
    else remember();
  }

  function choosePlace(place) {
    if (current >= 0) episodes[current].row.removeAttribute("aria-current");
    current = place;
    turn = -1;
    comparing = false;
    episodes[place].row.setAttribute("aria-current", "true");
    episodes[place].row.scrollIntoView({block: "nearest"});
    document.body.dataset.view = "episode";
    byId("episode").scrollTop = 0;
  }

  function remember() {
    const at = comparing ? "/compare" : turn >= 0 ? `/${turn + 1}` : "";
    history.replaceState(null, "", `#${encodeURIComponent(episodes[current].key)}${at}`);
  }

  function choose(place) {
    const cards = byId("episode").querySelectorAll("[data-turn]");
    if (!cards.length) return;
    if (cards[turn]) cards[turn].classList.remove("chosen");
    turn = Math.min(Math.max(place, 0), cards.length - 1);
    cards[turn].classList.add("chosen");
    cards[turn].scrollIntoView({block: "start"});
    remember();
  }

  function step(by) {
    if (!shown.length) return;
    const here = shown.indexOf(current);
    open(shown[here < 0 ? 0 : Math.min(Math.max(here + by, 0), shown.length - 1)]);
  }

  function follow() {
    if (location.hash.startsWith("#?")) return preset(new URLSearchParams(location.hash.slice(2)));
    const [id, at] = location.hash.slice(1).split("/");
    let wanted = id;
    try { wanted = decodeURIComponent(id); } catch (error) { wanted = id; }
    const place = episodes.findIndex((episode) => episode.key === wanted);
    if (!id || place < 0) return false;
    if (at === "compare" && siblingsOf(place).length > 1) compare(place);
    else open(place, parseInt(at, 10) || 0);
    return true;
  }

  // Filters in the address, as the links of a report have them.
  function preset(wanted) {
    for (const id of ["label", "task", "outcome"]) {
      const value = wanted.get(id) || "";
      byId(id).value = [...byId(id).options].some((option) => option.value === value) ? value : "";
    }
    filter();
    return openFirst();
  }

  // Of two policies, whether only the first one solved this: what training improved.
  function isImproved(place) {
    const policies = [...tally((e) => e.label).keys()], {label, siblings} = episodes[place];
    return policies.length === 2 && label === policies[0] && isSolved(episodes[place])
      && groups.get(siblings).some((other) => episodes[other].label === policies[1] && isUnsolved(episodes[other]));
  }

  // The first improved episode in the list, else the first that was not solved, else the first one.
  function openFirst() {
    if (!shown.length) return false;
    const place = shown.find(isImproved) ?? shown.find((each) => isUnsolved(episodes[each]));
    open(place === undefined ? shown[0] : place);
    return true;
  }

  const KEYS = {
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    l: () => choose(turn + 1), ArrowRight: () => choose(turn + 1), h: () => choose(turn - 1), ArrowLeft: () => choose(turn - 1),
    c: () => { if (current >= 0) { if (comparing) open(current); else compare(current); } },
    "/": () => byId("search").focus(),
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["INPUT", "SELECT"].includes(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  window.addEventListener("hashchange", () => {
    if (current < 0 || !location.hash.startsWith(`#${encodeURIComponent(episodes[current].key)}`)) follow();
  });

  prepareFilters();
  prepareList();
  filter();
  document.body.dataset.view = "list";
  if (!follow() && !openFirst()) byId("episode").append(el("p", {class: "empty", text: "There are no episodes here."}));
  document.documentElement.dataset.ready = "yes";
})();
