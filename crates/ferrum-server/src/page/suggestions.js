// What to begin with: prompts for the empty page, such as the model can answer.

/** The first whose pattern is found in the model's name holds. */
const SUGGESTIONS = [
  {
    // The small model inside the program knows stories, facts, sums and counting, and little else.
    name: /^ferrum-demo\b|^demo$/i,
    prompts: ["Tell me a story about a fox.", "What is the capital of France?", "What is 7 plus 5?", "Count from 3 to 9."],
  },
  {
    name: /cod(?:e|er|ing)|starcoder|devstral/i,
    prompts: [
      "Write a Python function that finds duplicate files.",
      "Explain ownership in Rust with a short example.",
      "Write a regular expression for ISO dates, and test it.",
      "What does `git rebase --onto` do?",
    ],
  },
  {
    name: /math|prover/i,
    prompts: [
      "Prove that the square root of 2 is irrational.",
      "Solve x² − 5x + 6 = 0 step by step.",
      "What is the integral of x · eˣ?",
      "Explain Bayes' theorem with an example.",
    ],
  },
  {
    name: /(?:)/,
    prompts: [
      "Explain how a language model chooses its next word.",
      "Help me plan a week of simple dinners.",
      "Write a polite reply that declines an invitation.",
      "Give me five ideas for a rainy afternoon.",
    ],
  },
];

export function suggestionsFor(model) {
  return SUGGESTIONS.find(({ name }) => name.test(model)).prompts;
}
