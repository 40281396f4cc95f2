"""Learning curves and Pareto fronts of groups of runs, as SVG, PNG and one page of HTML."""
