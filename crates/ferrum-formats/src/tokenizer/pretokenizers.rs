//! The pre-tokenizers that `tokenizer.ggml.pre` names.
//!
//! The names are those llama.cpp writes; the expressions are those of the models' own
//! `tokenizer.json`.

use super::pretokenize::Rule;
use super::unicode::NUMBER;

/// What a name in `tokenizer.ggml.pre` says about a byte-pair vocabulary.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Applied in turn.
    pub(super) rules: Vec<Rule>,
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Tokens are written in the GPT-2 alphabet; otherwise as text with `▁` for spaces.
    pub(super) byte_level: bool,
    /// BOS is added unless the file says otherwise.
    pub(super) add_bos: bool,
    /// SEP is added unless the file says otherwise.
    pub(super) add_sep: bool,
    /// The default BOS of byte-pair vocabularies does not hold.
    pub(super) no_default_bos: bool,
}

pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`LLAMA3`], digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The last expression of the DeepSeek V3 family.
const DEEPSEEK3: &str = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k: words end where an upper-case letter follows a lower-case one.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`GPT4O`], without contractions, digits one by one.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";

/// Digits in groups of three.
const DIGITS: &str = r"\p{N}{1,3}";
/// Digits one by one.
const DIGIT: &str = r"\p{N}";
const LINES: &str = r"[^\n]+|[\n]+";
/// Ideographs and kana.
const CJK: &str = r"[一-龥\u{3040}-\u{30FF}]+";
/// Ideographs, and Hangul as the older DeepSeek expressions reach it.
const CJK_WIDE: &str = r"[一-龥\u{800}-一\u{AC00}-\u{D7FF}]+";
/// BLOOM's words.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Asian scripts that AFMoE sets apart.
const ASIAN: &str = concat!(
    "[",
    r"\u{4E00}-\u{9FFF}\u{3400}-\u{4DBF}\u{F900}-\u{FAFF}\u{3040}-\u{309F}\u{30A0}-\u{30FF}",
    r"\u{FF65}-\u{FF9F}\u{2F00}-\u{2FDF}\u{E40}-\u{E7F}\u{E80}-\u{EFF}\u{1780}-\u{17FF}",
    r"\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}\u{AC00}-\u{D7AF}\u{1100}-\u{11FF}",
    "]+",
);
/// Letters of scripts with two cases, as DeepSeek LLM lists them, after white space.
const CASED_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}",
    r"\u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}",
    r"\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}",
    r"\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}",
    r"\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}",
    r"\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}",
    r"\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}",
    r"\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}",
    r"\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}",
    r"\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}",
    r"\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}",
    r"\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}",
    r"\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}",
    r"\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}",
    r"\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}",
    r"\u{1E900}-\u{1E943}",
    "]+",
);

/// The rules of these expressions, which are all written in this file.
fn rules(patterns: &[&str]) -> Vec<Rule> {
    let rule = |pattern: &&str| Rule::from_regex(pattern).expect("an expression of this file");
    patterns.iter().map(rule).collect()
}

fn plain(patterns: &[&str]) -> PreTokenizer {
    PreTokenizer {
        rules: rules(patterns),
        ignore_merges: false,
        byte_level: true,
        add_bos: false,
        add_sep: false,
        no_default_bos: false,
    }
}

/// Digits in groups of three from the right, as llama.cpp has them for `superbpe` and `afmoe`.
const THOUSANDS: Rule = Rule::Thousands {
    class: NUMBER,
    at_boundary: false,
};

/// The rules of vocabularies that name no pre-tokenizer, or one that is not known.
pub(super) fn fallback() -> PreTokenizer {
    plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])
}

/// The pre-tokenizer that `name` stands for; `None`: not known.
pub(super) fn by_name(name: &str) -> Option<PreTokenizer> {
    Some(match name {
        "default" => fallback(),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" | "jina-v5-nano" => PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(&[LLAMA3])
        },
        "minicpm5" => PreTokenizer {
            ignore_merges: true,
            ..plain(&[DIGITS, &LLAMA3.replace("{1,3}", "+")])
        },
        "jais-2" => plain(&[JAIS2]),
        "dbrx" | "smaug-bpe" => plain(&[LLAMA3]),
        "chatglm-bpe" => PreTokenizer {
            no_default_bos: true,
            ..plain(&[LLAMA3])
        },
        "glm4" | "glm5" => PreTokenizer {
            no_default_bos: true,
            ignore_merges: true,
            ..plain(&[LLAMA3])
        },
        "deepseek-llm" => plain(&[
            r"[\r\n]",
            CASED_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            CJK_WIDE,
            r"\p{N}+",
        ]),
        "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_WIDE, DIGIT]),
        "deepseek-v3" | "hunyuan-dense" | "hy_v4" | "joyai-llm" => plain(&[DIGITS, CJK, DEEPSEEK3]),
        "spark2_5" => {
            let words = DEEPSEEK3.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]");
            plain(&[DIGITS, CJK, &words, DIGIT])
        }
        "afmoe" => PreTokenizer {
            rules: [THOUSANDS]
                .into_iter()
                .chain(rules(&[ASIAN, DEEPSEEK3]))
                .collect(),
            ..plain(&[])
        },
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => plain(&[DIGIT, GPT2]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "gigachat" | "jina-v2-es" | "jina-v2-de"
        | "a.x-4.0" | "mellum" | "modern-bert" | "mpt" | "olmo" | "jais" | "trillion"
        | "granite-docling" | "exaone4" => plain(&[GPT2]),
        "jina-v1-en" | "jina-v2-code" | "roberta-bpe" => PreTokenizer {
            add_sep: true,
            ..plain(&[GPT2])
        },
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan"
        | "solar-open" | "grok-2" | "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[QWEN2]),
        "qwen35" => plain(&[QWEN35]),
        "ufakzeka" => plain(&[&QWEN2.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)|", "")]),
        "seed-coder" => plain(&[&QWEN2.replace(r"+[\r\n]*", "+")]),
        "laguna" => plain(&[LINES, QWEN2]),
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, DIGIT]),
        "tekken" => PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(&[TEKKEN])
        },
        "chameleon" => PreTokenizer {
            add_bos: true,
            ..plain(&[r"[\t\n]|    |  ", DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT2])
        },
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => plain(&[GPT4O]),
        "granite-embed-multi-97m" => PreTokenizer {
            ignore_merges: true,
            ..plain(&[GPT4O])
        },
        "tiny_aya" | "cohere2moe" => plain(&[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
        "youtu" => PreTokenizer {
            ignore_merges: true,
            ..plain(&[
                r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u{303F}\u{FE30}-\u{FE4F}]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-\u{30FF}]+",
                &GPT4O.replace("{1,3}", ""),
            ])
        },
        "kimi-k2" => plain(&[KIMI]),
        "superbpe" => PreTokenizer {
            rules: rules(&[r"\p{N}+"]).into_iter().chain([THOUSANDS]).collect(),
            ..plain(&[])
        },
        "exaone-moe" => plain(&[EXAONE_MOE]),
        // Text with `▁` for spaces, split at line breaks only.
        "gemma4" | "granite-embed-multi-311m" | "sarvam-moe" => PreTokenizer {
            byte_level: false,
            ..plain(&[LINES])
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::pretokenize::split;
    use crate::tokenizer::texts::Random;
    use fancy_regex::Regex;
    use tokenizers::tokenizer::pattern::Pattern;

    /// Every expression that has a rule of its own kind, and other spellings.
    const EXPRESSIONS: &[&str] = &[
        GPT2,
        LLAMA3,
        QWEN2,
        QWEN35,
        DEEPSEEK3,
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
        GPT4O,
        TEKKEN,
        KIMI,
        JAIS2,
        EXAONE_MOE,
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        DIGITS,
        DIGIT,
        r"\p{N}+",
        "[0-9][0-9][0-9]",
        LINES,
        CJK,
        CJK_WIDE,
        BLOOM,
        CASED_LETTERS,
        ASIAN,
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
        r"\s+$",
        r"[\r\n]",
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"[\t\n]|    |  ",
        r"[\p{P}!-/:-@\[-`{-~]",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u{303F}\u{FE30}-\u{FE4F}]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-\u{30FF}]+",
        " ?[ a]{2,3}",
        r"\w+",
    ];

    #[test]
    fn rules_match_as_their_regular_expressions() {
        for (seed, pattern) in (0..).zip(EXPRESSIONS) {
            let theirs = Regex::new(pattern).unwrap();
            let ours = Rule::from_regex(pattern).expect(pattern);
            let mut random = Random(seed);
            for round in 0..3_000 {
                let mut text = random.text();
                if round % 50 == 0 {
                    text = text.repeat(20) + &" ".repeat(random.below(700) as usize) + "x";
                }
                let found = (&ours).find_matches(&text).unwrap();
                let expected = (&theirs).find_matches(&text).unwrap();
                assert_eq!(found, expected, "{pattern}: {text:?}");
            }
        }
    }

    #[test]
    fn other_expressions_have_no_rule() {
        for pattern in [
            "",
            " ",
            r"\s+(?!\S)|\s+",
            r"[a]|[b]+",
            r"[a]*",
            r"[a]+?",
            r"[a]{0,3}",
            r"[a]{1000}",
            r"(?i)[a]+",
            r"[a",
            r"[^\s\S]+",
            r"\p{Nope}+",
            r"x?[a]+",
            &format!("{LLAMA3}|x"),
            &GPT4O.replacen("[^", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^", 1),
        ] {
            assert!(Rule::from_regex(pattern).is_none(), "{pattern}");
        }
    }

    /// Pieces of one expression are split by the next, and every expression of the table is known.
    #[test]
    fn every_name_covers_a_text() {
        let text = "Hello  World's 1234567 ²½ 日本語 한국어 é\r\n\n\t!? //x";
        for name in [
            "default",
            "llama-bpe",
            "minicpm5",
            "jais-2",
            "smaug-bpe",
            "chatglm-bpe",
            "glm4",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "spark2_5",
            "afmoe",
            "falcon",
            "starcoder",
            "gpt-2",
            "roberta-bpe",
            "qwen2",
            "qwen35",
            "ufakzeka",
            "seed-coder",
            "laguna",
            "bloom",
            "viking",
            "tekken",
            "chameleon",
            "gpt-4o",
            "tiny_aya",
            "youtu",
            "granite-embed-multi-97m",
            "kimi-k2",
            "superbpe",
            "exaone-moe",
            "gemma4",
        ] {
            let pieces = split(&by_name(name).expect(name).rules, text);
            let joined: String = pieces.into_iter().map(|piece| &text[piece]).collect();
            assert_eq!(joined, text, "{name}");
        }
    }

    #[test]
    fn thousands_from_the_right() {
        let rules = by_name("superbpe").unwrap().rules;
        let pieces = |text: &'static str| -> Vec<_> {
            split(&rules, text)
                .into_iter()
                .map(|piece| &text[piece])
                .collect()
        };
        assert_eq!(pieces("a1234567 12"), ["a", "1", "234", "567", " ", "12"]);
    }
}
