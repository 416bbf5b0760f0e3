// The most repeated phrases of one rollout; a bar is the share of its responses, from none to all.
function phraseRows(phrases) {
  return phrases.map(({ text, share }) => element("li", {},
    element("span", { class: "text" }, text), element("b", {}, formatPercent(share)),
    element("span", { class: "bar", style: `width:${100 * share}%` })));
}

function phraseList(index) {
  const heading = element("h4", {});
  const rows = element("ol", {});
  const show = (shown) => {
    // two lines for every rollout, so that nothing below moves with the pointer
    heading.replaceChildren("Most repeated", element("br"), `in rollout ${run.rollouts[shown]}`);
    rows.replaceChildren(...phraseRows(run.phrases[shown]));
  };
  show(index);
  return { box: element("div", {}, heading, rows), show };
}

// The first rollout stands still; the other list is the last rollout's, or the one's under the pointer.
function phraseBox() {
  const said = run.rollouts.map((_, i) => i).filter((i) => run.phrases[i].length);
  if (said.length === 0) return [];
  const lists = element("div", { class: "phrase-lists" }, phraseList(said[0]).box);
  if (said.length > 1) {
    const last = said[said.length - 1];
    const moving = phraseList(last);
    cursor.listeners.push(() => moving.show(said.includes(cursor.index) ? cursor.index : last));
    lists.append(moving.box);
  }
  return [element("div", { class: "phrases" }, lists, element("p", {}, "Words in a row, and the share of sampled answers that contain them."))];
}

// What stands beside the reward curve, if anything does.
function notesCard() {
  const phrases = phraseBox();
  if (run.notes.length + phrases.length === 0) return [];
  const list = element("ul", {}, ...run.notes.map((note) => element("li", {}, note)));
  return [element("aside", { class: "card notes", "aria-label": "Notes" }, element("h3", {}, "Read this with the curve"), list, ...phrases)];
}
