"""report.json and how people read it: Markdown, HTML, charts."""
