//! Grammars against the demo model's vocabulary: which texts they let through, and that whatever is
//! chosen of what a mask allows comes to a text of the grammar.

use super::*;
use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_types::TokenId;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

static DEMO: &[u8] = include_bytes!("../../../../assets/demo/ferrum-demo.gguf");

fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let open = || Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap();
    Arc::clone(TOKENIZER.get_or_init(|| Arc::new(open())))
}

fn compiler() -> &'static GrammarCompiler {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| GrammarCompiler::new(tokenizer(), tokenizer().vocab_size()))
}

fn compile(grammar: &Grammar) -> Constraint {
    compiler()
        .compile(grammar)
        .unwrap_or_else(|e| panic!("{grammar:?}: {e}"))
}

fn schema(schema: Value) -> Grammar {
    Grammar::JsonSchema {
        schema,
        lenient: false,
    }
}

fn lark(text: &str) -> Grammar {
    Grammar::Lark {
        text: text.into(),
        parts: Vec::new(),
    }
}

fn gbnf(text: &str) -> Grammar {
    Grammar::Gbnf(text.into())
}

fn accepts(constraint: &Constraint, text: &str) -> bool {
    let tokens = tokenizer().encode(text, EncodeOptions::PLAIN).unwrap();
    // Nothing depends on how a text is split, so its bytes one by one tell the same.
    let whole = constraint.accepts(&tokens);
    let bytes: Vec<_> = text.bytes().map(byte_token).collect();
    assert_eq!(whole, constraint.accepts(&bytes), "{text:?}");
    whole
}

/// The token of a single byte.
fn byte_token(byte: u8) -> TokenId {
    let all = 0..tokenizer().vocab_size() as TokenId;
    let mut found = all.filter(|&id| {
        !tokenizer().is_special(id) && tokenizer().token_bytes(id).is_some_and(|b| b == [byte])
    });
    found.next().unwrap()
}

struct Case {
    grammar: Grammar,
    yes: &'static [&'static str],
    no: &'static [&'static str],
}

fn cases() -> Vec<Case> {
    let person = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let tree = json!({
        "$ref": "#/$defs/node",
        "$defs": {"node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": false,
        }},
    });
    let json_gbnf = r#"
        root   ::= object
        value  ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
        array  ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
        ws     ::= | " " | "\n" [ \t]{0,20}  # little
    "#;
    vec![
        Case {
            grammar: Grammar::json_object(),
            yes: &[
                "{}",
                "{\"a\": [1, null, {\"b\": \"é\\n\"}]}",
                "{\n  \"a\": 1e5\n}",
            ],
            no: &[
                "",
                "[]",
                "{",
                "{\"a\": 1,}",
                "{} ",
                "{\"a\":      1}",
                "{\"a\": \"\n\"}",
            ],
        },
        Case {
            grammar: schema(person),
            yes: &[
                "{\"name\": \"Ann\", \"age\": 30}",
                "{\"name\":\"\",\"age\":0}",
            ],
            no: &[
                "{\"age\": 30, \"name\": \"Ann\"}",
                "{\"name\": \"Ann\"}",
                "{\"name\": \"Ann\", \"age\": -1}",
                "{\"name\": \"Ann\", \"age\": 1.5}",
                "{\"name\": \"Ann\", \"age\": 1, \"x\": 2}",
            ],
        },
        Case {
            grammar: schema(tree),
            yes: &["{\"next\": null}", "{\"next\":{\"next\":{\"next\":null}}}"],
            no: &["null", "{\"next\": {}}"],
        },
        Case {
            grammar: schema(Value::Bool(true)),
            yes: &["1", "[true]", "\"x\""],
            no: &["tru", "nul l"],
        },
        Case {
            grammar: Grammar::Regex("[a-c]{2,3}/\\d+".into()),
            yes: &["ab/7", "abc/123"],
            no: &["a/7", "abcd/7", "ab/"],
        },
        Case {
            grammar: Grammar::Regex("^(ab|b)$".into()),
            yes: &["ab", "b"],
            no: &["a", "abb"],
        },
        Case {
            grammar: Grammar::Choice(vec!["yes".into(), "yes, \"but\"".into(), "né".into()]),
            yes: &["yes", "yes, \"but\"", "né"],
            no: &["no", "yes,", "YES"],
        },
        Case {
            grammar: lark("start: sum\nsum: num (\"+\" num)*\nnum: /[0-9]+/ | \"(\" sum \")\""),
            yes: &["1", "1+22", "(1+2)+3"],
            no: &["+1", "(1", "1 + 2"],
        },
        Case {
            grammar: gbnf(json_gbnf),
            yes: &[
                "{}",
                "{\"a\": [1, -2.5e3 ,true] }",
                "{\"\\u00e9\":{\"b\": \"\"}}",
            ],
            no: &["[]", "{\"a\"}", "{\"a\":01}", "{\"a\": tru}"],
        },
        Case {
            grammar: gbnf("root ::= (\"a\" | [^a-c\\n] .){2} \"]\"? \"\\x41\\u00e9\"\n"),
            yes: &["aaAé", "a\u{e4}x]Aé", "d\nxyAé"],
            no: &["aA\u{e9}", "abxAé", "aaaaAé"],
        },
        Case {
            grammar: gbnf("root ::= \"[\" (root (\",\" root)*)? \"]\""),
            yes: &["[]", "[[],[[]]]"],
            no: &["[", "[,]", "[[]"],
        },
        Case {
            grammar: Grammar::Lark {
                text: "start: \"<\" @a \">\" @b".into(),
                parts: vec![
                    ("a".into(), schema(json!({"enum": ["x", 1]}))),
                    ("b".into(), Grammar::Regex("y+".into())),
                ],
            },
            yes: &["<1>y", "<\"x\">yy"],
            no: &["<x>y", "<1>", "1y"],
        },
    ]
}

#[test]
fn a_grammar_lets_its_texts_through_and_no_others() {
    for case in cases() {
        let constraint = compile(&case.grammar);
        for text in case.yes {
            assert!(accepts(&constraint, text), "{:?}: {text:?}", case.grammar);
        }
        for text in case.no {
            assert!(!accepts(&constraint, text), "{:?}: {text:?}", case.grammar);
        }
    }
}

/// So many properties, or patterns for them.
fn properties(n: usize) -> Value {
    let property = |i: usize| (format!("p{i}[a-z]*"), json!({"type": "string"}));
    Value::Object((0..n).map(property).collect())
}

#[test]
fn what_cannot_be_compiled_says_why() {
    let deep = |n: usize| (0..n).fold(json!({}), |inner, _| json!({"items": inner}));
    let cases = [
        (schema(json!({"not": {}})), "not"),
        (schema(json!({"type": "strin"})), "strin"),
        (schema(json!({"x-guidance": {}})), "x-guidance"),
        (schema(json!({"$ref": "#/$defs/gone"})), "gone"),
        (
            schema(json!({"$ref": "https://example.com/a.json"})),
            "example.com",
        ),
        (
            schema(json!({"type": "string", "pattern": "("})),
            "unclosed group",
        ),
        (schema(json!([1])), "an object or a boolean"),
        (schema(json!(false)), "false"),
        (
            schema(deep(80)),
            "depth of the schema: found 65, expected at most 64",
        ),
        (
            schema(json!({"maxItems": 1e9})),
            "maxItems: found 1000000000, expected at most 10000",
        ),
        (
            schema(json!({"enum": ["x".repeat(300_000)]})),
            "bytes of the grammar",
        ),
        (
            schema(json!({"items": {"properties": properties(251)}})),
            "properties that are not required: found 251, expected at most 250",
        ),
        (
            schema(json!({"patternProperties": properties(33)})),
            "patternProperties: found 33, expected at most 32",
        ),
        (
            schema(json!({"type": "string", "minLength": 5, "maxLength": 4})),
            "nsatisfiable",
        ),
        (Grammar::Regex("a(".into()), "unclosed group"),
        (Grammar::Regex("a(?=b)".into()), "look-around"),
        (Grammar::Regex("a^b".into()), "x"),
        (Grammar::Choice(Vec::new()), "nothing to choose"),
        (
            Grammar::Choice(vec!["a".into(); 2000]),
            "strings: found 2000",
        ),
        (lark("start: a"), "unknown name: \"a\""),
        (lark("start: @gone"), "gone"),
        (
            lark(&format!(
                "start: {}\"a\"{}",
                "(".repeat(100),
                ")".repeat(100)
            )),
            "too deeply nested",
        ),
        (gbnf("root ::= a"), "no rule \"a\""),
        (gbnf("a ::= \"a\""), "no rule \"root\""),
        (gbnf("root ::= \"a\"\nroot ::= \"b\""), "two rules \"root\""),
        (gbnf("root ::= \"a"), "line 1: found the end"),
        (gbnf("\nroot = \"a\""), "line 2: found '=', expected ::="),
        (gbnf("root ::= [z-a]"), "lower to higher"),
        (gbnf("root ::= []"), "a character in `[]`"),
        (gbnf("root ::= \"a\"{1,99999}"), "a number up to 10000"),
        (
            gbnf("root ::= <think>"),
            "tokens as symbols are not supported",
        ),
        (gbnf("root ::= (\"a\""), "`)`"),
        (
            gbnf(&format!("root ::= {}", "(".repeat(100_000))),
            "less depth",
        ),
        (gbnf("root ::= \"\\q\""), "an escape"),
    ];
    let mut wrong = Vec::new();
    for (grammar, expected) in cases {
        let found = match compiler().compile(&grammar) {
            Ok(_) => "it compiles".to_owned(),
            Err(error) => error.to_string(),
        };
        assert!(found.len() < 400, "{found}");
        if !found.contains(expected) {
            wrong.push(format!("{found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // As many as there may be can be written.
    let most = compile(&schema(
        json!({"properties": properties(250), "additionalProperties": false}),
    ));
    assert!(accepts(&most, "{\"p249[a-z]*\": \"\"}"));
    let lenient = Grammar::JsonSchema {
        schema: json!({"not": {}, "type": "boolean"}),
        lenient: true,
    };
    assert!(accepts(&compile(&lenient), "true"));
}

/// What is small to write and large to carry out is either refused or done within the limits: this
/// test would not end, or run out of stack or memory, if it were not so.
#[test]
fn grammars_that_mean_harm_are_held_to_the_limits() {
    let many = |n: usize| {
        let property = |i: usize| {
            (
                format!("p{i}"),
                json!({"type": "string", "maxLength": 9000}),
            )
        };
        json!({"type": "object", "properties": (0..n).map(property).collect::<serde_json::Map<_, _>>()})
    };
    let doubling = |n: usize| {
        let rules = (1..n).map(|i| format!("T{i}: T{} T{}\n", i - 1, i - 1));
        format!(
            "T0: /[a-z]/\n{}start: T{}",
            rules.collect::<String>(),
            n - 1
        )
    };
    let all_of = (0..60).fold(json!({"$ref": "#"}), |inner, i| {
        json!({"allOf": [{"anyOf": [inner.clone(), {"properties": {format!("{i}"): {}}}]}]})
    });
    let grammars = [
        Grammar::Regex("(((a{1,100}){1,100}){1,100}){1,100}".into()),
        Grammar::Regex("(.*a){20}.*(b.*){20}".into()),
        Grammar::Regex("(a|aa)*b|(a|b)*a(a|b){200}".into()),
        Grammar::Regex(format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000))),
        Grammar::Regex("\\w{5000}\\d{5000}".into()),
        schema(many(1500)),
        schema(all_of),
        schema(
            json!({"type": "array", "items": {"type": "array", "minItems": 9000}, "minItems": 9000}),
        ),
        schema(json!({"type": "string", "pattern": "^(.*x){50}$", "minLength": 5000})),
        schema(json!({"properties": properties(250), "patternProperties": properties(32)})),
        schema(json!({"patternProperties": properties(2000), "properties": properties(240)})),
        schema(json!({"properties": properties(9000)})),
        schema(json!({"multipleOf": 1.000_000_1, "minimum": -1e300, "maximum": 1e300})),
        lark(&doubling(40)),
        lark("start: a{1,1000000000}\na: \"x\" a?"),
        lark("start: a\na: a a | \"x\" |"),
        lark("start: (a | b)*\na: /.*/\nb: /.*/ \"x\"?"),
        lark(&format!("A: {}/a/\nstart: A", "~".repeat(50_000))),
        gbnf(&format!(
            "root ::= {}",
            "(\"a\"{0,9999}){0,9999} ".repeat(50)
        )),
        gbnf("root ::= root root | \"a\" | root \"b\" root |"),
    ];
    for grammar in grammars {
        let Ok(constraint) = compiler().compile(&grammar) else {
            continue;
        };
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut guide = constraint.guide(&[]);
        for _ in 0..20 {
            let Ok(mask) = guide.mask() else { break };
            let allowed = allowed(&mask);
            if allowed.is_empty() {
                break;
            }
            let token = allowed[random.next_u32() as usize % allowed.len()];
            if !matches!(guide.accept(token), Ok(false)) {
                break;
            }
        }
    }
}

fn allowed(mask: &Mask) -> Vec<TokenId> {
    let all = 0..tokenizer().vocab_size() as TokenId;
    all.filter(|&token| mask.allows(token)).collect()
}

#[test]
fn special_tokens_are_allowed_only_where_they_are_named() {
    let tokenizer = tokenizer();
    let mut ends = tokenizer.eos_ids().to_vec();
    ends.sort_unstable();
    let special = |token: &TokenId| tokenizer.is_special(*token);
    let all: Vec<TokenId> = (0..tokenizer.vocab_size() as TokenId)
        .filter(special)
        .collect();
    assert!(all.len() > ends.len());
    let mut guide = compile(&Grammar::Regex("(?s:.*)".into())).guide(&ends);
    for _ in 0..2 {
        // Anything may come, and the end too: of what is no text only the end.
        let mask = guide.mask().unwrap();
        let found: Vec<_> = allowed(&mask).into_iter().filter(special).collect();
        assert_eq!(found, ends);
        guide.accept(byte_token(b'<')).unwrap();
    }
    let other = *all.iter().find(|token| !ends.contains(token)).unwrap();
    let text = format!("start: {} \"a\"", lark_token(other));
    let mut guide = compile(&lark(&text)).guide(&ends);
    assert_eq!(allowed(&guide.mask().unwrap()), [other]);
    assert!(!guide.accept(other).unwrap());
    assert_eq!(allowed(&guide.mask().unwrap()), [byte_token(b'a')]);
    // Nothing can follow, and the model need not say so.
    assert!(guide.accept(byte_token(b'a')).unwrap());
    assert!(guide.mask().unwrap().is_empty());

    // Free text in which the token begins something that is not free.
    let text = "start: (FREE @ call)* FREE\ncall: \"x\"\nFREE: /(?s:.*)/";
    let constraint = compile(&lark(&text.replace('@', &lark_token(other))));
    let [a, x] = [byte_token(b'a'), byte_token(b'x')];
    for tokens in [&[][..], &[a, x], &[other, x], &[a, other, x, a, other, x]] {
        assert!(constraint.accepts(tokens), "{tokens:?}");
    }
    for tokens in [&[other][..], &[other, a], &[a, other, other, x]] {
        assert!(!constraint.accepts(tokens), "{tokens:?}");
    }

    // A stop token that is text is also part of the grammar.
    let b = byte_token(b'b');
    let mut guide = compile(&Grammar::Regex("ab?".into())).guide(&[b, ends[0]]);
    assert!(!guide.mask().unwrap().allows(b));
    guide.accept(byte_token(b'a')).unwrap();
    let mask = guide.mask().unwrap();
    assert!(mask.allows(b) && mask.allows(ends[0]));
}

#[test]
fn masks_of_drafts_are_those_of_tokens_one_by_one() {
    let threads = MaskThreads::start();
    let constraint = compile(&schema(
        json!({"type": "array", "items": {"type": "integer"}}),
    ));
    let tokens: Vec<_> = b"[1,23]".iter().map(|&b| byte_token(b)).collect();
    let mut plain = constraint.guide(tokenizer().eos_ids());
    let mut drafted = constraint.guide(tokenizer().eos_ids());
    drafted.begin(&tokens, &threads);
    for &token in &tokens {
        plain.begin(&[], &threads);
        let (a, b) = (plain.mask().unwrap(), drafted.mask().unwrap());
        assert_eq!(allowed(&a), allowed(&b));
        assert_eq!(plain.accept(token), drafted.accept(token));
    }
    // Masks after a forbidden draft token are not computed.
    let mut guide = constraint.guide(&[]);
    guide.begin(&[byte_token(b'x'), byte_token(b'y')], &threads);
    assert_eq!(
        allowed(&guide.mask().unwrap()),
        allowed(&constraint.guide(&[]).mask().unwrap())
    );
    assert!(guide.accept(byte_token(b'x')).is_err());
}

#[test]
fn a_mask_takes_away_what_it_does_not_allow() {
    let mut guide = compile(&Grammar::Regex("[ab]".into())).guide(&[]);
    let mask = guide.mask().unwrap();
    let mut logits: Vec<f32> = (0..tokenizer().vocab_size()).map(|i| i as f32).collect();
    mask.apply(&mut logits);
    for (i, &logit) in logits.iter().enumerate() {
        let expected = if mask.allows(i as TokenId) {
            i as f32
        } else {
            f32::NEG_INFINITY
        };
        assert_eq!(logit, expected);
    }
}

/// Chooses among allowed tokens, in ways that no model would.
fn babble(constraint: &Constraint, seed: u64, most: usize) -> Option<String> {
    let ends = tokenizer().eos_ids().to_vec();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut guide = constraint.guide(&ends);
    let mut tokens = Vec::new();
    let text = |tokens: &[TokenId]| tokenizer().decode(tokens, false);
    let closes = |token: &&TokenId| {
        let bytes = tokenizer().token_bytes(**token).unwrap_or_default();
        bytes.iter().any(|b| b"\"}],:".contains(b))
    };
    while tokens.len() < most {
        let allowed = allowed(&guide.mask().unwrap());
        if allowed.is_empty() {
            return Some(text(&tokens));
        }
        let closing: Vec<_> = allowed.iter().filter(closes).copied().collect();
        // Evenly of all, or of what brings the end near.
        let from = match (random.next_u32() % 4, closing.is_empty()) {
            (0, _) | (_, true) => &allowed,
            _ => &closing,
        };
        let token = from[random.next_u32() as usize % from.len()];
        if ends.contains(&token) {
            return Some(text(&tokens));
        }
        tokens.push(token);
        if guide.accept(token).unwrap() {
            return Some(text(&tokens));
        }
    }
    None
}

fn any_schema() -> impl Strategy<Value = Value> {
    let number = (-50i32..50, 0i32..60)
        .prop_map(|(low, span)| json!({"type": "integer", "minimum": low, "maximum": low + span}));
    let text = (0usize..4, 0usize..6).prop_map(
        |(least, more)| json!({"type": "string", "minLength": least, "maxLength": least + more}),
    );
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "number"})),
        Just(json!({"type": ["string", "integer"]})),
        Just(json!({"enum": ["a", "a\"b", "é", 7, null, [1, {"x": true}]]})),
        Just(json!({"const": {"deep": ["\\", "\n"]}})),
        Just(json!({"type": "string", "pattern": "^[a-f]{2}-\\d+$"})),
        Just(json!({"type": "string", "format": "date"})),
        Just(json!({"$ref": "#/$defs/list"})),
        number,
        text,
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let properties = prop::collection::vec((inner.clone(), any::<bool>()), 0..4);
        let object = (properties, any::<bool>()).prop_map(|(properties, open)| {
            let names = (0..properties.len()).map(|i| format!("key {i}"));
            let named: Vec<_> = names.zip(&properties).collect();
            let required = named.iter().filter(|(_, (_, required))| *required);
            let required: Vec<_> = required.map(|(name, _)| name.clone()).collect();
            let map: serde_json::Map<_, _> = named
                .iter()
                .map(|(name, (schema, _))| (name.clone(), schema.clone()))
                .collect();
            json!({
                "type": "object",
                "properties": map,
                "required": required,
                "additionalProperties": open,
            })
        });
        let array = (inner.clone(), 0usize..3, 0usize..3).prop_map(|(items, least, more)| {
            json!({"type": "array", "items": items, "minItems": least, "maxItems": least + more})
        });
        let either = prop::collection::vec(inner, 1..4).prop_map(|any| json!({"anyOf": any}));
        prop_oneof![object, array, either]
    })
}

/// Whether `value` is valid, for the keywords that [`any_schema`] makes.
fn is_valid(schema: &Value, value: &Value) -> bool {
    let Some(schema) = schema.as_object() else {
        return schema == true;
    };
    let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
    let within = |n: usize, least: &str, most: &str| {
        bound(least).is_none_or(|least| n as f64 >= least)
            && bound(most).is_none_or(|most| n as f64 <= most)
    };
    let is = |kind: &Value| match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    schema.iter().all(|(key, rule)| match key.as_str() {
        "type" => rule
            .as_array()
            .map_or_else(|| is(rule), |kinds| kinds.iter().any(is)),
        "enum" => rule.as_array().unwrap().contains(value),
        "const" => rule == value,
        "anyOf" => rule.as_array().unwrap().iter().any(|s| is_valid(s, value)),
        "$ref" => is_valid(&list(), value),
        "minimum" => value.as_f64().is_none_or(|x| x >= rule.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|x| x <= rule.as_f64().unwrap()),
        "minLength" => value
            .as_str()
            .is_none_or(|text| within(text.chars().count(), "minLength", "maxLength")),
        "minItems" => value
            .as_array()
            .is_none_or(|items| within(items.len(), "minItems", "maxItems")),
        "items" => value
            .as_array()
            .is_none_or(|items| items.iter().all(|item| is_valid(rule, item))),
        "required" => value.as_object().is_none_or(|map| {
            let names = rule.as_array().unwrap().iter();
            names
                .map(|n| n.as_str().unwrap())
                .all(|name| map.contains_key(name))
        }),
        "properties" => value.as_object().is_none_or(|map| {
            map.iter().all(|(name, value)| match rule.get(name) {
                Some(schema) => is_valid(schema, value),
                None => schema["additionalProperties"] == true,
            })
        }),
        "pattern" => value.as_str().is_some_and(|text| {
            let (hex, digits) = text.split_once('-').unwrap_or_default();
            hex.len() == 2
                && hex.bytes().all(|b| (b'a'..=b'f').contains(&b))
                && !digits.is_empty()
                && digits.bytes().all(|b| b.is_ascii_digit())
        }),
        "format" => value.as_str().is_some_and(|text| {
            let parts: Vec<_> = text.split('-').map(str::len).collect();
            parts == [4, 2, 2]
        }),
        _ => true,
    })
}

/// A list of lists.
fn list() -> Value {
    json!({"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 0, "maxItems": 2})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn whatever_is_chosen_the_answer_is_valid(schema in any_schema(), seed in any::<u64>()) {
        let mut whole = schema.clone();
        whole["$defs"] = json!({"list": list()});
        let constraint = compile(&Grammar::JsonSchema { schema: whole, lenient: false });
        let mut finished = 0;
        for round in 0..6 {
            let Some(text) = babble(&constraint, seed ^ round, 400) else {
                continue;
            };
            finished += 1;
            let value: Value = match serde_json::from_str(&text) {
                // JSON knows no limit to numbers.
                Err(error) if error.to_string().contains("number out of range") => continue,
                value => value.map_err(|e| TestCaseError::fail(format!("{e}: {text}")))?,
            };
            prop_assert!(is_valid(&schema, &value), "{schema}: {text}");
        }
        prop_assert!(finished > 0, "{schema}: nothing came to an end");
    }
}

proptest! {
    #[test]
    fn no_gbnf_is_too_strange(
        parts in prop::collection::vec(prop::sample::select(vec![
            "root", " ::= ", "a", "\n", "\"x\"", "\"", "[a-z]", "[^", "]", "-", "\\", "\\x4", "(", ")", "|", "*",
            "+", "?", "{2}", "{1,", "}", ".", "#", "é", "\u{7f}", " ", "{9999}", "<", "!",
        ]), 0..24),
        rule in any::<bool>(),
    ) {
        let text = match rule {
            true => format!("root ::= {}", parts.concat()),
            false => parts.concat(),
        };
        // It compiles or says why not.
        if let Err(error) = compiler().compile(&gbnf(&text)) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn a_grammar_is_compiled_once_for_as_long_as_there_is_room() {
    let one = schema(json!({"type": "object", "properties": {"a": {}, "b": {}}}));
    let other_order = schema(json!({"type": "object", "properties": {"b": {}, "a": {}}}));
    let lenient = Grammar::JsonSchema {
        schema: json!({"type": "object", "properties": {"a": {}, "b": {}}}),
        lenient: true,
    };
    let compiled = compile(&one);
    assert!(compiled.is_shared_with(&compile(&one.clone())));
    for other in [&other_order, &lenient] {
        assert!(!compiled.is_shared_with(&compile(other)), "{other:?}");
    }
    // Room for two of this size.
    let cache = cache::GrammarCache::new(3 * (256 << 10) - 1);
    let get = |text: &str| {
        let grammar = Grammar::Regex(text.into());
        let mut compiled = false;
        let constraint = cache.get_or_compile(&grammar, || {
            compiled = true;
            compiler().compile(&grammar)
        });
        constraint.unwrap();
        compiled
    };
    assert!(get("a") && get("b") && !get("a") && get("c"));
    assert!(get("b"), "the least recent one has gone");
    assert!(!get("c") && get("a"));
    // Faults are found again, and what is larger than all is not kept.
    let wrong = Grammar::Regex("(".into());
    for _ in 0..2 {
        let fault = cache.get_or_compile(&wrong, || compiler().compile(&wrong));
        assert!(fault.is_err());
    }
    let tight = cache::GrammarCache::new(1000);
    let never = || Err::<Constraint, ()>(());
    assert!(
        tight
            .get_or_compile(&one, || Ok::<_, ()>(compiled.clone()))
            .is_ok()
    );
    assert!(
        tight.get_or_compile(&one, never).is_err(),
        "there is no room"
    );
}
