"""The pages in a real Chromium: they render, follow a run, show hostile text as text, and break no policy."""

READY = "document.documentElement.dataset.ready === 'yes'"


def open_page(served, page, address=""):
    page.goto(served.trainer.create_web_link())
    page.wait_for(READY)
    if address:
        page.evaluate(f"location.hash = {address!r}")


def test_the_table_lists_runs_and_filters_them(served, page):
    run_ids = {served.done(steps=steps) for steps in (3, 5)}
    open_page(served, page)
    links = "[...document.querySelectorAll('.rows .row:not([hidden]) a')].map(link => link.textContent)"
    assert run_ids <= set(page.evaluate(links))
    page.evaluate("""
      document.querySelector('.filters input').value = 'step>40';
      document.querySelector('.filters').requestSubmit();
    """)
    page.wait_for("document.querySelector('.count').textContent === '1 run'")
    page.evaluate("""
      document.querySelector('.filters input').value = 'step>';
      document.querySelector('.filters').requestSubmit();
    """)
    page.wait_for("!document.querySelector('main > .error').hidden")
    assert all("422" in problem for problem in page.problems)
    page.problems.clear()


def test_a_run_is_followed_while_it_goes_on(served, page):
    run_id = served.trainer.start_run({"steps": 2000, "rate": 50}, runner="echo")
    try:
        open_page(served, page, f"#/runs/{run_id}")
        page.wait_for("Number(document.querySelector('.curves')?.dataset.live) >= 2")
        page.wait_for("document.querySelector('.summary .phase-running')")
        before = page.evaluate("document.querySelector('.latest').textContent")
        page.wait_for(f"document.querySelector('.latest').textContent !== {before!r}")
    finally:
        served.trainer.stop_run(run_id)
    page.wait_for("document.querySelector('.summary .phase-stopped')")


HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;'


def test_hostile_names_metrics_and_output_are_shown_as_text(served, page):
    run_id = served.done(steps=20)
    served.trainer.update_run(run_id, name=HOSTILE, tags=[HOSTILE], notes=f"{HOSTILE}\n</pre><svg onload=alert(1)>")
    attempt = served.home.run(run_id).path / "attempt_1"
    with (attempt / "stdout.log").open("a") as log:
        log.write(f"{HOSTILE}\n\x1b]0;title\x07\x1b[31mred\x1b[0m\n")
    open_page(served, page)
    page.wait_for("document.querySelector('.rows').innerText.includes('onerror')")
    page.evaluate(f"location.hash = '#/runs/{run_id}'")
    page.wait_for("document.querySelector('.output')?.textContent.includes('red')")
    assert page.evaluate("document.querySelector('h1').textContent") == HOSTILE
    assert page.evaluate("document.querySelector('.notes').textContent").startswith(HOSTILE)
    output = page.evaluate("document.querySelector('.output').textContent")
    assert HOSTILE in output
    assert "\x1b" not in output
    # A metric with such a name, as the stream and the stored series would deliver it.
    page.evaluate(f"""(async () => {{
      const {{ Chart }} = await import('/web/chart.js');
      const chart = new Chart({HOSTILE!r}, {{ signal: new AbortController().signal }});
      chart.setSeries([{{ label: {HOSTILE!r}, color: '#000', points: [[1, 2], [2, 'NaN'], [3, 4]] }}]);
      document.querySelector('main').append(chart.root);
      chart.point(80, 50);
      chart.draw();
    }})()""")
    assert page.evaluate("document.querySelectorAll('main img, main script, main svg').length") == 0
    assert page.evaluate("window.hacked === undefined")


def test_runs_are_compared_with_curves(served, page):
    first, second = served.done(steps=40), served.done(steps=50)
    open_page(served, page, f"#/compare?run={first}&run={second}&metric=m0")
    page.wait_for("document.querySelector('.chart')?.dataset.loaded === 'yes'", timeout_s=60)
    assert "steps" in page.evaluate("document.querySelector('main').innerText")


def test_two_browsers_see_the_same_run_and_neither_has_the_others_access(served, browser, page):
    run_id = served.trainer.start_run({"steps": 2000, "rate": 50}, runner="echo")
    other = browser.open()
    try:
        other.goto(f"{served.url}/web/")
        other.wait_for("document.body.innerText.includes('palaestra runs open')")
        for one in (page, other):
            one.goto(served.trainer.create_web_link(run_id))
        for one in (page, other):
            one.wait_for("Number(document.querySelector('.curves')?.dataset.live) >= 2")
    finally:
        browser.close_page(other)
        served.trainer.stop_run(run_id)


def test_a_slow_connection_shows_the_table(served, page):
    run_id = served.done()
    page.set_network(latency_ms=300, bytes_per_s=30_000)
    open_page(served, page)
    page.wait_for(f"document.querySelector('.rows').textContent.includes('{run_id}')")
