"""The numbers of one attempt, by metric: any range of ten million points in a few milliseconds.

`<i>.pts` holds every point of the metric that stands on line i of `names.jsonl`, `<i>.l1` to `<i>.l5` what is left of
them when 16, 256, … neighbours become one bucket, and `commits.log` how much of all that counts. Derived from the
journal and rebuilt from it whenever in doubt.
"""
