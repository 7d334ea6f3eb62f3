"""What a file is written for: one record per target, each in a module, and the list of them.

``record`` has the record, ``registry`` the list, and ``names`` what users write, without imports.
"""
