"""``mopd bench weights``: a student's weights on their way to engine servers, by every way."""
