// The oracles of MiniWoB pages by name. Each gets the text of the instruction and returns the next action.
//
// They act on what the screen and the instruction show. Pages that hide things behind tabs or sections are searched from
// the first to the last, so that the next action follows from the screen.

const submit = () => document.querySelector('#subbtn, button.secondary-action');
const quoted = (text) => [...text.matchAll(/"([^"]*)"/g)].map((match) => match[1]);
const firstReachable = (elements, act) => elements.map(act).find((action) => action !== null) ?? null;

// Select exactly the named checkboxes or radio buttons, then submit.
const select = (text) => {
  const names = text.match(/^Select (.*) and click Submit\.$/)[1].split(', ');
  for (const label of all('#boxes label')) {
    const box = label.querySelector('input');
    const wanted = names.includes(textOf(label));
    if (box.checked !== wanted && (wanted || box.type === 'checkbox')) return clickText(label);
  }
  return click(submit());
};

// Click the link with this text, or the part of the page after the open one.
const search = (link, parts, open) => {
  const visible = byText('.alink', link).filter(isShown);
  return firstReachable(visible, clickText) ?? clickText(parts[(open + 1) % parts.length]);
};

const ORDINALS = ['1st', '2nd', '3rd'];
const SHAPES = { rect: 'rectangle', circle: 'circle', polygon: 'triangle' };
const describeShape = (element) => {
  const name = element.tagName === 'text' ? element.textContent : SHAPES[element.tagName];
  const width = element.tagName === 'text' ? parseInt(element.getAttribute('font-size')) : element.getBBox().width;
  const kind = element.tagName !== 'text' ? 'shape' : /\d/.test(name) ? 'digit' : 'letter';
  return { size: width > 15 ? 'large' : 'small', color: element.getAttribute('fill'), names: ['item', name, kind] };
};
const readClipboard = () => window[Symbol.for('palaestra.clipboard')].text;

const PAGES = {
  'click-test'() {
    return click(submit());
  },
  'click-test-2'() {
    return click(byText('button', 'ONE')[0]);
  },
  'click-button'(text) {
    return firstReachable(byText('#area button', quoted(text)[0]), click);
  },
  'click-button-sequence'() {
    return click(byText('button', buttonsPushed.length === 0 ? 'ONE' : 'TWO')[0]);
  },
  'click-link'(text) {
    return firstReachable(byText('.alink', quoted(text)[0]), clickText);
  },
  'click-dialog'() {
    return click(document.querySelector('.ui-dialog-titlebar-close'));
  },
  'click-dialog-2'(text) {
    const [name] = quoted(text);
    if (name === 'x') return click(document.querySelector('.ui-dialog-titlebar-close'));
    return click(byText('.ui-dialog-buttonpane button', name)[0]);
  },
  'click-tab'(text) {
    return clickText(byText('#area ul a', text.match(/Tab #\d/)[0])[0]);
  },
  'click-tab-2'(text) {
    const tabs = all('#area ul a');
    const open = tabs.findIndex((tab) => tab.parentElement.getAttribute('aria-selected') === 'true');
    return search(quoted(text)[0], tabs, open);
  },
  'click-checkboxes': select,
  'click-checkboxes-transfer': select,
  'click-option': select,
  'click-collapsible'() {
    if (!all('.ui-accordion-content').some(isShown)) return clickText(document.querySelector('#area h3'));
    return click(submit());
  },
  'click-collapsible-2'(text) {
    const heads = all('#area h3');
    const open = heads.findIndex((head) => head.getAttribute('aria-expanded') === 'true');
    return search(quoted(text)[0], heads, open);
  },
  'choose-list'(text) {
    const list = document.querySelector('select');
    const name = text.match(/^Select (.*) from the list and click Submit\.$/)[1];
    const wanted = [...list.options].find((option) => textOf(option) === name);
    if (list.matches(':open')) return clickOption(wanted);
    return wanted.selected ? click(submit()) : click(list);
  },
  'enter-text'(text) {
    return fillAndClick([[document.querySelector('#tt'), quoted(text)[0]]], submit());
  },
  'enter-text-dynamic'(text) {
    return PAGES['enter-text'](text);
  },
  'enter-password'(text) {
    const [password] = quoted(text);
    return fillAndClick(['#password', '#verify'].map((id) => [document.querySelector(id), password]), submit());
  },
  'login-user'(text) {
    const values = quoted(text);
    return fillAndClick(
      ['#username', '#password'].map((id, index) => [document.querySelector(id), values[index]]), submit()
    );
  },
  'focus-text'() {
    return click(document.querySelector('#tt'));
  },
  'focus-text-2'(text) {
    return click(all('#area input')[ORDINALS.findIndex((word) => text.includes(word))]);
  },
  'click-widget'(text) {
    return firstReachable(all(`[data-type="${quoted(text)[0]}"]`), click);
  },
  'click-color'(text) {
    const color = text.match(/^Click on the (.*) colored box\.$/)[1];
    return click(document.querySelector(`#area [data-color="${color}"]`));
  },
  'click-shape'(text) {
    const words = text.match(/^Click on a (.*)$/)[1].split(' ');
    const name = words.pop();
    const matches = all('#area_svg *').filter((element) => {
      const shape = describeShape(element);
      return shape.names.includes(name) && words.every((word) => word === shape.size || word === shape.color);
    });
    return firstReachable(matches, click);
  },
  'enter-date'(text) {
    const [, month, day, year] = text.match(/(\d+)\/(\d+)\/(\d+)/);
    return fillParts(document.querySelector('#tt'), `${year}-${month}-${day}`, month + day + year) ?? click(submit());
  },
  'enter-time'(text) {
    const [, hour, minute, half] = text.match(/(\d+):(\d+)\s*([AP]M)/);
    const hours = (Number(hour) % 12) + (half === 'PM' ? 12 : 0);
    const value = `${String(hours).padStart(2, '0')}:${minute}`;
    return fillParts(document.querySelector('#tt'), value, hour.padStart(2, '0') + minute + half) ?? click(submit());
  },
  'use-autocomplete'(text) {
    const [start, end = ''] = quoted(text);
    const field = document.querySelector('#tags');
    const isWanted = (name) => name.startsWith(start) && name.endsWith(end);
    const items = all('.ui-autocomplete li').filter(isShown);
    if (isWanted(field.value) && items.length === 0) return click(submit());
    const item = items.find((one) => isWanted(textOf(one)));
    return item ? clickText(item.firstElementChild ?? item) : fill(field, start) ?? press('ArrowDown');
  },
  'read-table'(text) {
    const name = text.match(/^Enter the value of (.*) into the text field and press Submit\.$/)[1];
    const row = all('#tab tr').find((one) => textOf(one.cells[0]) === name);
    return fillAndClick([[document.querySelector('#tt'), row.cells[1].textContent]], submit());
  },
  'copy-paste'() {
    const source = document.querySelector('#to-copy'), target = document.querySelector('#answer-input');
    if (target.value === source.value) return click(submit());
    if (readClipboard() !== source.value) {
      if (document.activeElement !== source) return click(source);
      return isAllSelected(source) ? press('Control', 'c') : press('Control', 'a');
    }
    if (document.activeElement !== target) return click(target);
    return target.value !== '' && !isAllSelected(target) ? press('Control', 'a') : press('Control', 'v');
  },
  'simple-arithmetic'() {
    const [, first, sign, second] = textOf(document.querySelector('#math-problem')).match(/(\d) ([-+x]) (\d)/);
    const [a, b] = [Number(first), Number(second)];
    const answer = { '+': a + b, '-': a - b, x: a * b }[sign];
    return fillAndClick([[document.querySelector('#math-answer'), String(answer)]], submit());
  },
  'multi-orderings'(text) {
    const [, genre, director, year] = text.match(/^Search for (.*) movies directed by (.*) from year (\d+)\.$/);
    const values = { Genre: genre, Director: director, Year: year };
    const pairs = all('#area tr').map((row) => [row.querySelector('input'), values[textOf(row.cells[0])]]);
    return fillAndClick(pairs, document.querySelector('#area .final'));
  },
};

const utterance = () => {
  const text = core.getUtterance();
  return (typeof text === 'string' ? text : text.utterance).replace(/\s+/g, ' ').trim();
};
