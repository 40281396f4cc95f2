// Functions with which an oracle looks at the page and returns the next action, as the JSON of `sessions/action.py`.
//
// They read the page and change nothing. An oracle is called again after every action and keeps no state of its own.

const type = (text) => ({ kind: 'type', text });
const press = (...keys) => ({ kind: 'press', keys });
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const textOf = (element) => element.textContent.replace(/\s+/g, ' ').trim();
const byText = (selector, text) => all(selector).filter((element) => textOf(element) === text);
const isShown = (element) => element !== undefined && element.getClientRects().length > 0;

// The largest box of an element; a link that is broken into two lines has two.
const largest = (boxes) => [...boxes].sort((a, b) => b.width * b.height - a.width * a.height)[0];
const boxOf = (element) => largest(element.getClientRects());
const textBoxOf = (element) => {
  const range = document.createRange();
  const words = [...element.childNodes].find((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  range.selectNodeContents(words ?? element);
  return largest(range.getClientRects());
};

// The pixel of a box that is nearest to the middle of its visible part; null if no part of it is visible.
const visiblePoint = (element, box) => {
  const left = Math.max(0, Math.ceil(box.left)), right = Math.min(innerWidth, Math.floor(box.right)) - 1;
  const top = Math.max(0, Math.ceil(box.top)), bottom = Math.min(innerHeight, Math.floor(box.bottom)) - 1;
  const stepX = Math.max(1, Math.floor((right - left) / 20)), stepY = Math.max(1, Math.floor((bottom - top) / 20));
  const hits = [];
  const add = (x, y) => {
    const hit = document.elementFromPoint(x, y);
    if (hit !== null && (hit === element || element.contains(hit))) hits.push([x, y]);
  };
  for (let x = left; x <= right; x += stepX) for (let y = top; y <= bottom; y += stepY) add(x, y);
  if (hits.length === 0) return null;
  const mean = (axis) => hits.reduce((sum, hit) => sum + hit[axis], 0) / hits.length;
  const middle = [mean(0), mean(1)];
  add(Math.round(middle[0]), Math.round(middle[1]));
  const distance = ([x, y]) => Math.hypot(x - middle[0], y - middle[1]);
  return hits.reduce((best, hit) => (distance(hit) < distance(best) ? hit : best));
};

const canScroll = (element) =>
  element === document.scrollingElement ||
  (element.scrollHeight > element.clientHeight && /auto|scroll/.test(getComputedStyle(element).overflowY));
const scrollTo = (box, element) => {
  let area = element.parentElement;
  while (area !== null && !canScroll(area)) area = area.parentElement;
  if (area === null) return null;
  const isPage = area === document.scrollingElement;
  const frame = isPage ? new DOMRect(0, 0, innerWidth, innerHeight) : area.getBoundingClientRect();
  const room = area.scrollHeight - area.clientHeight - area.scrollTop;
  const wanted = (box.top + box.bottom) / 2 - (frame.top + Math.min(frame.bottom, innerHeight)) / 2;
  const dy = Math.round(Math.min(room, Math.max(-area.scrollTop, wanted)));
  if (dy === 0) return null;
  const at = [(frame.left + Math.min(frame.right, innerWidth)) / 2, (frame.top + Math.min(frame.bottom, innerHeight)) / 2];
  return { kind: 'scroll', at: at.map(Math.floor), dx: 0, dy };
};

// Click on a box of an element, or scroll until it is visible; null if it cannot be reached.
const clickBox = (element, box) => {
  const at = box === undefined ? null : visiblePoint(element, box);
  if (at !== null) return { kind: 'click', at };
  return box === undefined ? null : scrollTo(box, element);
};
const click = (element) => (isShown(element) ? clickBox(element, boxOf(element)) : null);
// Click on the words of an element, for example of the label of a checkbox.
const clickText = (element) => (isShown(element) ? clickBox(element, textBoxOf(element)) : null);
// Click an item of an open drop-down list, or turn the wheel over the list until the item is visible.
const clickOption = (option) => {
  const at = visiblePoint(option, boxOf(option));
  if (at !== null) return { kind: 'click', at };
  const options = [...option.closest('select').options];
  const visible = options.map((one) => visiblePoint(one, boxOf(one))).filter((point) => point !== null);
  const middle = visible[Math.floor(visible.length / 2)];
  const { top, bottom } = boxOf(option);
  return { kind: 'scroll', at: middle, dx: 0, dy: Math.round((top + bottom) / 2 - middle[1]) };
};

const isAllSelected = (field) => field.selectionStart === 0 && field.selectionEnd === field.value.length;
// The next action that gives a text field this value; null if it has it.
const fill = (field, text) => {
  if (field.value === text) return null;
  if (document.activeElement !== field) return click(field);
  if (field.value !== '' && !isAllSelected(field)) return press('Control', 'a');
  return text === '' ? press('Delete') : type(text);
};
// Fill fields in order, then click a button.
const fillAndClick = (pairs, button) => {
  for (const [field, text] of pairs) {
    if (field.value !== text) return fill(field, text);
  }
  return click(button);
};
// Type a date or a time, beginning with its first part. Which part has the focus cannot be read from the page, so this
// continues only from a field without focus, or one that was just clicked here.
const fillParts = (field, value, keys) => {
  if (field.value === value) return null;
  if (document.activeElement === field) return type(keys);
  const { left, top, height } = boxOf(field);
  return clickBox(field, new DOMRect(left + 4, top, 12, height));
};
