"""Small Python functions that the dialogues ask for, as (request, name, code, explanation).

Written for this project; data only. `dialogues.py` picks names and adds the chat around them.
"""

FUNCTIONS = [
    (
        "adds two numbers",
        "add",
        "def add(a, b):\n    return a + b",
        "It returns the sum of a and b.",
    ),
    (
        "subtracts two numbers",
        "subtract",
        "def subtract(a, b):\n    return a - b",
        "It returns a minus b.",
    ),
    (
        "multiplies two numbers",
        "multiply",
        "def multiply(a, b):\n    return a * b",
        "It returns the product of a and b.",
    ),
    (
        "returns the square of a number",
        "square",
        "def square(x):\n    return x * x",
        "It multiplies x by itself.",
    ),
    (
        "checks whether a number is even",
        "is_even",
        "def is_even(n):\n    return n % 2 == 0",
        "A number is even if 2 divides it without a remainder.",
    ),
    (
        "checks whether a number is odd",
        "is_odd",
        "def is_odd(n):\n    return n % 2 == 1",
        "A number is odd if dividing it by 2 leaves 1.",
    ),
    (
        "returns the larger of two numbers",
        "larger",
        "def larger(a, b):\n    if a > b:\n        return a\n    return b",
        "It compares a with b and returns the larger one.",
    ),
    (
        "computes the factorial of a number",
        "factorial",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n"
        "    return result",
        "It multiplies all numbers from 1 to n.",
    ),
    (
        "computes the factorial with recursion",
        "factorial",
        "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)",
        "It calls itself with n - 1 until n is 1.",
    ),
    (
        "computes the n-th Fibonacci number",
        "fibonacci",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
        "    return a",
        "It keeps the last two numbers and adds them n times.",
    ),
    (
        "reverses a string",
        "reverse",
        "def reverse(text):\n    return text[::-1]",
        "The slice [::-1] reads the string backwards.",
    ),
    (
        "counts the vowels in a string",
        "count_vowels",
        'def count_vowels(text):\n    return sum(1 for c in text.lower() if c in "aeiou")',
        "It counts each character that is one of a, e, i, o and u.",
    ),
    (
        "checks whether a string is a palindrome",
        "is_palindrome",
        "def is_palindrome(text):\n    return text == text[::-1]",
        "A palindrome reads the same in both directions.",
    ),
    (
        "sums a list of numbers",
        "total",
        "def total(numbers):\n    result = 0\n    for number in numbers:\n"
        "        result += number\n"
        "    return result",
        "It adds the numbers one after the other.",
    ),
    (
        "computes the mean of a list",
        "mean",
        "def mean(numbers):\n    return sum(numbers) / len(numbers)",
        "It divides the sum by the count.",
    ),
    (
        "finds the largest number in a list",
        "largest",
        "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n"
        "        if number > best:\n            best = number\n    return best",
        "It walks over the list and keeps the largest number seen so far.",
    ),
    (
        "finds the smallest number in a list",
        "smallest",
        "def smallest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n"
        "        if number < best:\n            best = number\n    return best",
        "It walks over the list and keeps the smallest number seen so far.",
    ),
    (
        "removes duplicates from a list",
        "unique",
        "def unique(items):\n    seen = set()\n    result = []\n    for item in items:\n"
        "        if item not in seen:\n            seen.add(item)\n"
        "            result.append(item)\n"
        "    return result",
        "It keeps the first copy of each item and the order of the list.",
    ),
    (
        "counts the words in a text",
        "count_words",
        "def count_words(text):\n    return len(text.split())",
        "It splits the text at white space and counts the parts.",
    ),
    (
        "checks whether a number is prime",
        "is_prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n    i = 2\n    while i * i <= n:\n"
        "        if n % i == 0:\n            return False\n        i += 1\n    return True",
        "It tries every divisor up to the square root of n.",
    ),
    (
        "computes the greatest common divisor",
        "gcd",
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        "It uses the algorithm of Euclid.",
    ),
    (
        "prints the numbers from 1 to n",
        "print_numbers",
        "def print_numbers(n):\n    for i in range(1, n + 1):\n        print(i)",
        "The range starts at 1 and ends at n.",
    ),
    (
        "says hello to a person",
        "greet",
        'def greet(name):\n    return "Hello, " + name + "!"',
        "It puts the name into a greeting.",
    ),
    (
        "reads a file and returns its text",
        "read_text",
        "def read_text(path):\n    with open(path) as file:\n        return file.read()",
        "The with statement closes the file again.",
    ),
    (
        "sorts a list of numbers",
        "sort_numbers",
        "def sort_numbers(numbers):\n    return sorted(numbers)",
        "The built-in function sorted returns a new list.",
    ),
    (
        "converts Celsius to Fahrenheit",
        "to_fahrenheit",
        "def to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32",
        "It multiplies by 9 / 5 and adds 32.",
    ),
    (
        "flattens a list of lists",
        "flatten",
        "def flatten(lists):\n    return [item for inner in lists for item in inner]",
        "It walks over the inner lists and collects their items.",
    ),
    (
        "searches a sorted list with binary search",
        "binary_search",
        "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n"
        "    while low <= high:\n        middle = (low + high) // 2\n"
        "        if items[middle] == target:\n            return middle\n"
        "        if items[middle] < target:\n            low = middle + 1\n        else:\n"
        "            high = middle - 1\n    return -1",
        "It halves the range in every step and returns -1 if the target is missing.",
    ),
]
