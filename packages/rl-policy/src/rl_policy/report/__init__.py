"""Reports of runs: `report.html`, a comparison of several, and a view of one in progress."""
