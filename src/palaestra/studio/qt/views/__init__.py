"""Views that pages and docks are made of: pictures, charts, forms, tables."""
