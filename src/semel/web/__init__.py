"""The page: topics, records, transactions, groups, Spark applications and the doctor of a cluster, in a browser.

`app` has the routes and the limits of who may ask what, `views` reads a cluster through the admin client and makes JSON
of it, `static/` is the page itself: plain HTML, CSS and JavaScript, without a build step and without other servers.
"""
