//! Answers that have to have a form: JSON, schemas, regular expressions, grammars, and calls of tools.

use super::Running;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// What the demo model would never say by itself.
fn order() -> Value {
    json!({
        "type": "object",
        "properties": {
            "item": {"enum": ["nail", "rail"]},
            "count": {"type": "integer", "minimum": 3, "maximum": 17},
            "note": {"type": "string", "maxLength": 4},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["item", "count", "note", "tags"],
        "additionalProperties": false,
        "$defs": {"tag": {"type": "string", "pattern": "^[A-C]{2}$"}},
    })
}

fn is_order(value: &Value) -> bool {
    let tag = |tag: &Value| {
        let tag = tag.as_str().unwrap_or_default();
        tag.len() == 2 && tag.bytes().all(|b| (b'A'..=b'C').contains(&b))
    };
    let tags = value["tags"].as_array().map_or(&[][..], Vec::as_slice);
    (value["item"] == "nail" || value["item"] == "rail")
        && value["count"]
            .as_u64()
            .is_some_and(|n| (3..=17).contains(&n))
        && value["note"]
            .as_str()
            .is_some_and(|text| text.chars().count() <= 4)
        && (1..=2).contains(&tags.len())
        && tags.iter().all(tag)
        && value.as_object().is_some_and(|map| map.len() == 4)
}

type Check = fn(&str) -> bool;

fn forms() -> Vec<(Value, Check)> {
    let json_order: Check = |text| serde_json::from_str(text).is_ok_and(|v| is_order(&v));
    let digits: Check = |text| {
        let (a, b) = text.split_once('-').unwrap_or_default();
        a.len() == 2 && b.len() == 3 && text.bytes().all(|b| b == b'-' || b.is_ascii_digit())
    };
    let choice: Check = |text| ["maybe so", "\"never\""].contains(&text);
    let sum: Check = |text| {
        let mut parts = text.split('+');
        parts.all(|part| part.len() == 1 && part.bytes().all(|b| b.is_ascii_digit()))
    };
    let tagged: Check = |text| {
        let inner = text
            .strip_prefix("<o>")
            .and_then(|text| text.strip_suffix("</o>"));
        inner.is_some_and(|text| serde_json::from_str(text).is_ok_and(|v| is_order(&v)))
    };
    let content = json!({"type": "json_schema", "json_schema": order()});
    let tag = json!({"type": "tag", "begin": "<o>", "content": content, "end": "</o>"});
    let tags = json!({"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<"], "tags": [tag],
        "at_least_one": true, "stop_after_first": true,
    }});
    let strict = json!({"name": "order", "strict": true, "schema": order()});
    let lark = "start: DIGIT (\"+\" DIGIT){1,4}\nDIGIT: /[0-9]/";
    let gbnf = "root ::= digit (\"+\" digit){1,4}\ndigit ::= [0-9]";
    vec![
        (
            json!({"response_format": {"type": "json_schema", "json_schema": strict}}),
            json_order,
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": order()}}),
            json_order,
        ),
        (
            json!({"response_format": {"type": "json_object", "value": order()}}),
            json_order,
        ),
        (json!({"regex": "[0-9]{2}-\\d{3}"}), digits),
        (json!({"ebnf": gbnf}), sum),
        (json!({"guided_json": order()}), json_order),
        (json!({"guided_json": order().to_string()}), json_order),
        (json!({"guided_regex": "[0-9]{2}-\\d{3}"}), digits),
        (json!({"guided_choice": ["maybe so", "\"never\""]}), choice),
        (json!({"guided_grammar": lark}), sum),
        (json!({"guided_grammar": gbnf}), sum),
        (json!({"grammar": gbnf}), sum),
        (json!({"structured_outputs": {"json": order()}}), json_order),
        (
            json!({"structured_outputs": {"regex": "[0-9]{2}-\\d{3}"}}),
            digits,
        ),
        (
            json!({"structured_outputs": {"choice": ["maybe so", "\"never\""]}}),
            choice,
        ),
        (json!({"structured_outputs": {"grammar": gbnf}}), sum),
        (
            json!({"response_format": {"type": "structural_tag", "format": tag}}),
            tagged,
        ),
        (
            json!({"structured_outputs": {"structural_tag": tags.to_string()}}),
            tagged,
        ),
        (
            json!({"structured_outputs": {"json_object": true, "json": null}}),
            |text| serde_json::from_str::<Map<_, _>>(text).is_ok(),
        ),
    ]
}

fn with(base: &Value, more: &Value) -> Value {
    let mut body = base.clone();
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn every_form_is_kept_to_on_both_routes_streamed_or_not() {
    let server = Running::demo();
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let chat =
        json!({"messages": messages, "max_tokens": 200, "temperature": 0.7, "seed": 3, "n": 2});
    let text = json!({"prompt": "Once upon a time", "max_tokens": 200, "seed": 4});
    for (fields, check) in forms() {
        let body = with(&chat, &fields);
        let answer = server.ask(CHAT, &body);
        let chunks = server.stream(CHAT, &with(&body, &json!({"stream": true})));
        for (i, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            let content = choice["message"]["content"].as_str().unwrap();
            let mine = chunks.iter().map(|chunk| &chunk["choices"][0]);
            let mine = mine.filter(|choice| choice["index"] == i);
            let pieces = mine.map(|choice| choice["delta"]["content"].as_str().unwrap_or(""));
            assert_eq!(content, pieces.collect::<String>(), "{fields}");
            // Any object is one of any length.
            let cut =
                choice["finish_reason"] == "length" && fields.to_string().contains("json_object");
            assert!(cut || check(content), "{fields}: {content:?}");
            assert!(
                cut || choice["finish_reason"] == "stop",
                "{fields}: {choice}"
            );
        }
        let answer = server.ask(TEXT, &with(&text, &fields));
        let choice = &answer["choices"][0];
        let cut = choice["finish_reason"] == "length" && fields.to_string().contains("json_object");
        assert!(
            cut || check(choice["text"].as_str().unwrap()),
            "{fields}: {choice}"
        );
    }
}

#[test]
fn a_form_that_asks_for_nothing_changes_nothing() {
    let server = Running::demo();
    let body =
        json!({"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "temperature": 0});
    let plain = server.ask(CHAT, &body);
    let same = server.ask(
        CHAT,
        &with(
            &body,
            &json!({"response_format": {"type": "text"}, "grammar": null}),
        ),
    );
    assert_eq!(plain["choices"], same["choices"]);
    // What the model says anyway is said with the same tokens, and as likely.
    let expression = json!({"guided_regex": "7 plus 5 is [0-9]+\\.", "logprobs": true});
    let held = server.ask(CHAT, &with(&body, &expression));
    let free = server.ask(CHAT, &with(&body, &json!({"logprobs": true})));
    assert_eq!(held["choices"][0]["message"], free["choices"][0]["message"]);
    assert_eq!(
        held["choices"][0]["logprobs"],
        free["choices"][0]["logprobs"]
    );
}

fn tools(strict: bool) -> Value {
    let wait = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let mut weather = json!({"name": "get_weather", "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
    }});
    if strict {
        weather["strict"] = true.into();
    }
    json!([
        {"type": "function", "function": weather},
        {"type": "function", "function": {"name": "wait", "parameters": wait}},
    ])
}

/// Calls as `(id, name, arguments)`, of a whole answer and of its stream.
fn calls(server: &Running, body: &Value) -> Vec<(String, String, Value)> {
    let answer = server.ask(CHAT, body);
    let message = &answer["choices"][0]["message"];
    let whole = message["tool_calls"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let whole: Vec<_> = whole
        .iter()
        .map(|call| {
            let function = &call["function"];
            (
                text(&call["id"]),
                text(&function["name"]),
                text(&function["arguments"]),
            )
        })
        .collect();
    let mut streamed: Vec<(String, String)> = Vec::new();
    let chunks = server.stream(CHAT, &with(body, &json!({"stream": true})));
    for chunk in &chunks {
        for call in chunk["choices"][0]["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            if call["id"].is_string() {
                streamed.push((text(&call["function"]["name"]), String::new()));
            }
            streamed.last_mut().unwrap().1 += call["function"]["arguments"].as_str().unwrap();
        }
    }
    let names = whole
        .iter()
        .map(|(_, name, arguments)| (name.clone(), arguments.clone()));
    assert_eq!(names.collect::<Vec<_>>(), streamed, "{body}");
    let mut whole = whole;
    match answer["choices"][0]["finish_reason"].as_str() {
        // The last was cut off.
        Some("length") => drop(whole.pop()),
        Some("tool_calls") => assert!(message["content"].is_null(), "{answer}"),
        _ => assert!(whole.is_empty(), "{answer}"),
    }
    let parsed = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let whole = whole.iter();
    whole
        .map(|(id, name, arguments)| (id.clone(), name.clone(), parsed(arguments)))
        .collect()
}

fn is_fine((_, name, arguments): &(String, String, Value)) -> bool {
    match name.as_str() {
        "wait" => *arguments == json!({}),
        "get_weather" => {
            (arguments["city"] == "Oslo" || arguments["city"] == "Rome")
                && arguments["days"]
                    .as_u64()
                    .is_some_and(|n| (1..=9).contains(&n))
                && arguments.as_object().is_some_and(|map| map.len() == 2)
        }
        _ => false,
    }
}

/// A template that speaks of calls as models of other families do.
fn template(calls: &str, begins: &str) -> String {
    let messages = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}";
    format!("{messages}{{{{ '<|im_start|>assistant\\n{begins}' }}}}{{# {calls} #}}")
}

#[test]
fn calls_are_held_to_their_schema_in_every_format() {
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let formats = [
        None,
        Some(template("{\"name\": \"\", \"parameters\": ", "")),
        Some(template("[TOOL_CALLS]", "")),
        Some(template("[TOOL_CALLS] [ARGS]", "")),
        Some(template("<function=x> <parameter=y>", "")),
        Some(template("[func_name1(a=b)]", "")),
        Some(template("<｜tool▁calls▁begin｜> ```json", "")),
        Some(template("<｜tool▁calls▁begin｜>", "")),
        Some(template("<arg_key>", "")),
        Some(template("<|tool_calls_section_begin|>", "")),
        Some(template("<|tool_call|>", "")),
        Some(template("<|tool_call|> <|/tool_call|>", "")),
        Some(template("<|channel|> <|message|>", "")),
    ];
    for source in formats {
        let server = match &source {
            None => Running::demo(),
            Some(source) => Running::with_template(source),
        };
        let question = json!([{"role": "user", "content": "What is the weather in Paris?"}]);
        let body = json!({
            "messages": question, "max_tokens": 250, "temperature": 0.8, "seed": 5, "tools": tools(false),
        });
        for (choice, parallel) in [
            (json!("required"), true),
            (json!("any"), false),
            (named.clone(), true),
        ] {
            let more = json!({"tool_choice": choice, "parallel_tool_calls": parallel});
            let found = calls(&server, &with(&body, &more));
            assert!(found.iter().all(is_fine), "{source:?} {more}: {found:?}");
            // Harmony lets it reason first, which this model may do to the end.
            let may_think = source
                .as_ref()
                .is_some_and(|source| source.contains("<|channel|>"));
            assert!(
                may_think || !found.is_empty(),
                "{source:?} {more}: {found:?}"
            );
            assert!(parallel || found.len() == 1, "{source:?} {more}: {found:?}");
            // There is nothing to say beside them.
            let begin = with(&more, &json!({"stream": true, "max_tokens": 2}));
            let chunks = server.stream(CHAT, &with(&body, &begin));
            let first = json!({"role": "assistant", "content": null});
            assert_eq!(chunks[0]["choices"][0]["delta"], first);
            if choice.is_object() {
                assert!(found.iter().all(|call| call.1 == "get_weather"));
            }
            let short = source
                .as_ref()
                .is_some_and(|source| source.contains("TOOL_CALLS"));
            assert!(
                found.iter().all(|(id, ..)| (id.len() == 9) == short),
                "{found:?}"
            );
        }
    }
}

#[test]
fn a_call_of_the_models_own_is_held_to_a_strict_schema() {
    let server = Running::demo();
    let ask = |text: &str, strict: bool| {
        let question = json!([{"role": "user", "content": text}]);
        let body = json!({"messages": question, "tools": tools(strict), "temperature": 0, "max_tokens": 250});
        (calls(&server, &body), server.ask(CHAT, &body))
    };
    let (free, _) = ask("What is the weather in Paris?", false);
    assert_eq!(free[0].2["city"], "Paris");
    let (held, _) = ask("What is the weather in Paris?", true);
    assert!(!held.is_empty() && held.iter().all(is_fine), "{held:?}");
    // Where it calls nothing it is as free as without.
    let (none, held) = ask("What is 7 plus 5?", true);
    let (_, free) = ask("What is 7 plus 5?", false);
    assert!(none.is_empty());
    assert_eq!(held["choices"], free["choices"]);
}

#[test]
fn an_answer_is_a_call_or_of_the_form_that_is_asked_for() {
    let server = Running::demo();
    let form = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema":
        {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}},
         "required": ["sum"], "additionalProperties": false}}});
    let ask = |text: &str| {
        let question = json!([{"role": "user", "content": text}]);
        json!({"messages": question, "tools": tools(true), "response_format": form, "temperature": 0, "max_tokens": 250})
    };
    let found = calls(&server, &ask("What is the weather in Paris?"));
    assert!(!found.is_empty() && found.iter().all(is_fine), "{found:?}");
    let body = with(&ask("What is 7 plus 5?"), &json!({"tool_choice": "none"}));
    let answer = server.ask(CHAT, &body);
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(content).unwrap();
    assert!(
        value["sum"].as_u64().is_some_and(|sum| sum < 100),
        "{content}"
    );
}

#[test]
fn reasoning_comes_before_the_form() {
    let server = Running::with_template(&template("</think>", "<think>\\n"));
    // This model does not end its reasoning.
    let body = json!({
        "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
        "max_tokens": 20, "temperature": 0, "guided_choice": ["twelve"],
    });
    let answer = server.ask(CHAT, &body);
    let message = &answer["choices"][0]["message"];
    assert!(
        !message["reasoning_content"].as_str().unwrap().is_empty(),
        "{answer}"
    );
    assert_eq!(message["content"], "", "{answer}");
}

#[test]
fn messages_in_channels_are_reasoning_and_content() {
    let server = Running::with_template(&template("<|channel|> <|message|>", ""));
    let body = json!({
        "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
        "max_tokens": 60, "temperature": 0, "guided_regex": "twelve",
    });
    let answer = server.ask(CHAT, &body);
    let message = &answer["choices"][0]["message"];
    let said = format!("{message}");
    assert!(!said.contains("channel"), "{answer}");
    let thought = message["reasoning_content"].as_str().unwrap_or_default();
    assert!(
        message["content"] == "twelve" || !thought.is_empty(),
        "{answer}"
    );
}

#[test]
fn an_integer_ends_though_the_model_would_not() {
    let server = Running::demo();
    let schema =
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let bias = server.ask(
        "/tokenize",
        &json!({"prompt": "1", "add_special_tokens": false}),
    );
    let digit = bias["tokens"][0].to_string();
    // All that it wants to say are digits.
    let body = json!({"prompt": "Once", "max_tokens": 60, "guided_json": schema, "logit_bias": {digit: 100}});
    let answer = server.ask(TEXT, &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let text = answer["choices"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value["n"].as_i64().unwrap() < 1 << 53, "{text}");
}
