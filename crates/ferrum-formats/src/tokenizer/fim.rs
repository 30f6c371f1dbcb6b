//! The tokens with which code models fill in the middle: given what stands before a gap and what stands after it, they
//! write what belongs between.
//!
//! A GGUF file may name the tokens in its metadata. Most do not, and a `tokenizer.json` has no place for it, so they are
//! also found by the spellings that families of models use ([`FAMILIES`]).

use ferrum_types::TokenId;

/// What the metadata of a GGUF file says about filling in the middle; see [`FimTokens`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FimIds {
    /// `tokenizer.ggml.fim_pre_token_id`, or the older `prefix_token_id`.
    pub prefix: Option<TokenId>,
    /// `tokenizer.ggml.fim_suf_token_id`, or the older `suffix_token_id`.
    pub suffix: Option<TokenId>,
    /// `tokenizer.ggml.fim_mid_token_id`, or the older `middle_token_id`.
    pub middle: Option<TokenId>,
    /// `tokenizer.ggml.fim_pad_token_id`.
    pub pad: Option<TokenId>,
    /// `tokenizer.ggml.fim_rep_token_id`.
    pub repo: Option<TokenId>,
    /// `tokenizer.ggml.fim_sep_token_id`.
    pub file: Option<TokenId>,
}

/// The tokens of a vocabulary that fill in the middle, and the order in which they stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FimTokens {
    /// Stands before the text before the gap.
    pub prefix: TokenId,
    /// Stands before the text after the gap.
    pub suffix: TokenId,
    /// Stands before the answer; `None` where the answer follows the prefix at once.
    pub middle: Option<TokenId>,
    /// Stands before the name of a repository.
    pub repo: Option<TokenId>,
    /// Stands before the name of a file.
    pub file: Option<TokenId>,
    /// Whether the text after the gap comes first.
    pub suffix_first: bool,
    /// Tokens at which an answer ends: those above, and those that a family ends with.
    pub ends: Vec<TokenId>,
}

/// How a family of models spells its tokens.
struct Family {
    prefix: &'static str,
    suffix: &'static str,
    middle: Option<&'static str>,
    suffix_first: bool,
    repo: &'static [&'static str],
    file: &'static [&'static str],
    /// Further tokens at which an answer ends.
    ends: &'static [&'static str],
}

/// A family that writes prefix, suffix, middle, and knows no repositories.
const fn plain(prefix: &'static str, suffix: &'static str, middle: &'static str) -> Family {
    Family {
        prefix,
        suffix,
        middle: Some(middle),
        suffix_first: false,
        repo: &[],
        file: &[],
        ends: &[],
    }
}

/// The known spellings. A vocabulary is of the first family of which it has all tokens.
const FAMILIES: [Family; 9] = [
    // Qwen 2.5 Coder and later, CodeGemma, Granite 3.3 and later.
    Family {
        repo: &["<|repo_name|>", "<|fim_repo|>"],
        file: &["<|file_sep|>"],
        ends: &["<|fim_pad|>", "<|file_separator|>", "<|endoftext|>"],
        ..plain("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    },
    // StarCoder 1 and 2, StableCode, Granite Code, Yi-Coder, Refact.
    Family {
        repo: &["<repo_name>", "<reponame>"],
        file: &["<file_sep>", "<filename>"],
        ends: &["<fim_pad>", "<|endoftext|>"],
        ..plain("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    },
    // SantaCoder.
    Family {
        repo: &["<fim-repo>"],
        ends: &["<fim-pad>", "<|endoftext|>"],
        ..plain("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
    },
    // DeepSeek Coder, V2 and V3.
    plain("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // Code Llama.
    Family {
        ends: &["▁<EOT>"],
        ..plain("▁<PRE>", "▁<SUF>", "▁<MID>")
    },
    Family {
        repo: &["<REPO>"],
        ends: &["<EOT>", "<PAD>"],
        ..plain("<PRE>", "<SUF>", "<MID>")
    },
    // GLM 4.5 and later.
    plain("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    // Codestral: its vocabulary has a token for the middle, which its prompts do not use.
    Family {
        middle: None,
        suffix_first: true,
        ..plain("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    },
    // Seed-Coder.
    Family {
        suffix_first: true,
        ..plain("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")
    },
];

/// The tokens of a vocabulary: those that its file names first, then those that it spells as a known family does.
pub(super) fn find(named: FimIds, id_of: impl Fn(&str) -> Option<TokenId>) -> Option<FimTokens> {
    let has = |text: &str| id_of(text).is_some();
    let family = FAMILIES
        .iter()
        .find(|of| has(of.prefix) && has(of.suffix) && of.middle.is_none_or(has));
    let first = |names: &[&str]| names.iter().find_map(|name| id_of(name));
    let spelled = |text: fn(&Family) -> &str| family.and_then(|of| id_of(text(of)));
    let prefix = named.prefix.or_else(|| spelled(|of| of.prefix))?;
    let suffix = named.suffix.or_else(|| spelled(|of| of.suffix))?;
    let middle = match family {
        Some(of) if of.middle.is_none() => None,
        Some(of) => named.middle.or_else(|| of.middle.and_then(&id_of)),
        None => named.middle,
    };
    let repo = named.repo.or_else(|| family.and_then(|of| first(of.repo)));
    let file = named.file.or_else(|| family.and_then(|of| first(of.file)));
    let further = family.into_iter().flat_map(|of| of.ends);
    let further = further.filter_map(|name| id_of(name));
    let mut ends = Vec::new();
    let known = [Some(prefix), Some(suffix), middle, named.pad, repo, file];
    for id in known.into_iter().flatten().chain(further) {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    Some(FimTokens {
        prefix,
        suffix,
        middle,
        repo,
        file,
        // With nothing before the answer, only the text before the gap can stand there.
        suffix_first: middle.is_none() || family.is_some_and(|of| of.suffix_first),
        ends,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: &[&str], named: FimIds) -> Option<FimTokens> {
        let id = |text: &str| tokens.iter().position(|token| *token == text);
        find(named, |text| id(text).map(|id| id as TokenId))
    }

    /// Tokens that begin with prefix, suffix and middle; the middle if it is used, whether the suffix is first, the ends.
    type Case<'a> = (&'a [&'a str], Option<TokenId>, bool, &'a [TokenId]);

    #[test]
    fn families_are_known_by_their_spellings() {
        let cases: [Case<'_>; 5] = [
            (
                &["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
                Some(2),
                false,
                &[0, 1, 2],
            ),
            (
                &["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
                Some(2),
                false,
                &[0, 1, 2, 3],
            ),
            (
                &["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
                Some(2),
                false,
                &[0, 1, 2],
            ),
            (&["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], None, true, &[0, 1]),
            (
                &["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
                Some(2),
                true,
                &[0, 1, 2],
            ),
        ];
        for (tokens, middle, suffix_first, ends) in cases {
            let found = of(tokens, FimIds::default()).unwrap();
            assert_eq!((found.prefix, found.suffix), (0, 1), "{tokens:?}");
            assert_eq!((found.middle, found.suffix_first), (middle, suffix_first));
            assert_eq!(found.ends, ends, "{tokens:?}");
        }
        assert_eq!(
            of(&["<fim_prefix>", "<fim_suffix>"], FimIds::default()),
            None
        );
        assert_eq!(of(&["a", "b"], FimIds::default()), None);
    }

    #[test]
    fn repositories_have_tokens_of_their_own() {
        let qwen = [
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_middle|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ];
        let found = of(&qwen, FimIds::default()).unwrap();
        assert_eq!((found.repo, found.file), (Some(4), Some(5)));
        assert_eq!(found.ends, [0, 1, 2, 4, 5, 3]);
    }

    #[test]
    fn a_file_may_name_what_no_family_spells() {
        let named = FimIds {
            prefix: Some(7),
            suffix: Some(8),
            middle: Some(9),
            ..FimIds::default()
        };
        let found = of(&[], named).unwrap();
        assert_eq!((found.prefix, found.suffix, found.middle), (7, 8, Some(9)));
        assert!(!found.suffix_first);
        let without = FimIds {
            middle: None,
            ..named
        };
        assert!(of(&[], without).unwrap().suffix_first);
        // What it names goes before what is spelled.
        let spelled = of(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], named);
        assert_eq!(spelled.unwrap().prefix, 7);
    }
}
