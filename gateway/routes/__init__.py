"""HTTP routes: one file per family of endpoints.

``answer`` has the half that both completions endpoints share, ``request_builder`` turns bodies into wire
requests, ``context`` holds the parts that all routes use, and ``openapi`` describes bodies and answers. The
application and the rooms of other protocols import this room; it imports every room below: answers, tools,
scheduler_link, text, schemas and http.
"""
