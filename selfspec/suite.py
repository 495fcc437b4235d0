"""A small prompt suite of this project's own writing, so that benchmarks and the demo run anywhere."""

CHAT = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    "I have an hour free every evening. Suggest three hobbies that need little money, and say what each one gives me.",
    "Write a short, friendly e-mail that asks a neighbour to water my plants while I am away for a week.",
    "What is the difference between weather and climate? Give one example of each.",
    "Write a short story of about ten sentences about a lighthouse keeper who finds a message in a bottle.",
    "List the steps for making a simple vegetable soup for four people.",
)
MATHS = (
    "A baker makes 18 loaves every morning and sells each for 4 dollars. On Monday 5 loaves stay unsold. "
    "How much money does the baker take on Monday? Think step by step.",
    "A train leaves at 9:40 and arrives at 12:15. It stands still for 20 minutes on the way. "
    "For how many minutes does it move? Explain each step.",
    "Tom has three times as many marbles as Ana. Together they have 48. How many marbles does each of them have?",
    "A garden is 12 metres long and 7 metres wide. Fence costs 9 dollars a metre. What does a fence all around cost?",
    "A shop lowers the price of a 60 dollar jacket by a quarter, then adds a tax of 10 percent. What does one pay?",
)
PYTHON = (
    "Write a Python function `is_palindrome(text)` that ignores case and everything that is not a letter.",
    "Write a Python function `count_words(path)` that returns a dictionary from each word in a text file to its count.",
    "Complete this Python function and explain it in one sentence.\n\n```python\ndef running_mean(values, width):\n"
    '    """Mean of every window of `width` neighbouring values."""\n```',
    "Write a Python function that merges two sorted lists into one sorted list without calling sort.",
    "Write a Python class `Stack` with push, pop, peek and a length, and raise an error when an empty stack is popped.",
)
SUITE = tuple(
    (f"{name}/{i}", text)
    for name, texts in (("chat", CHAT), ("maths", MATHS), ("python", PYTHON))
    for i, text in enumerate(texts)
)
