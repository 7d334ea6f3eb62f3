"""The targets that a file can be written for: one record each in its module, and their list.

``record`` has the record, ``registry`` the list, and ``names`` what users write, without imports.
"""
