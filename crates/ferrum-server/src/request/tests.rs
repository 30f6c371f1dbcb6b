use super::*;
use serde_json::{Value, json};

/// The error message of a response.
fn said(error: &ApiError) -> Value {
    serde_json::to_value(error.body()).unwrap()
}

fn body(value: &Value) -> Body {
    Body::new(value.to_string().into_bytes(), None).unwrap()
}

/// What is ignored of a chat completion.
fn ignored(value: &Value) -> Vec<String> {
    let mut body = body(value);
    body.part::<Standing>().unwrap();
    body.part::<Sampling>().unwrap();
    body.part::<Conversation>().unwrap();
    body.finish(false).unwrap()
}

#[test]
fn what_no_part_names_is_told_at_any_depth() {
    let request = json!({
        "temperature": 0.5,
        "mood": "good",
        "nothing": null,
        "user": {"any": "thing"},
        "messages": [
            {"role": "user", "content": "a", "refusal": null, "annotations": [1]},
            {"role": "user", "content": [{"type": "text", "text": "a", "weight": 1}], "x": [{"y": 1}]},
        ],
    });
    let expected = ["messages[1].content[0].weight", "messages[1].x", "mood"];
    assert_eq!(ignored(&request), expected);
    let mut strict = body(&request);
    strict.part::<Sampling>().unwrap();
    let error = strict.finish(true).unwrap_err();
    assert_eq!(said(&error)["error"]["code"], "unknown_parameter");
}

#[test]
fn ignored_names_fit_into_a_header() {
    let long = "x".repeat(1000);
    let mut request = json!({"a\nb": 1, "a,b": 1, "é": 1});
    request[&long] = 1.into();
    for i in 0..100 {
        request[format!("field{i}")] = 1.into();
    }
    let names = ignored(&request);
    assert_eq!(names.len(), MAX_IGNORED);
    assert_eq!(names[..2], ["a?b".to_owned(), "field0".to_owned()]);
    assert!(names.iter().all(|name| name.len() <= MAX_NAME));
}

#[test]
fn errors_name_their_field_by_its_path() {
    let cases = [
        (json!({"temperature": 3}), "temperature", "from 0 to 2"),
        (json!({"temperature": "a"}), "temperature", "\"a\""),
        (json!({"top_p": 1.5}), "top_p", "from 0 to 1"),
        (json!({"top_k": 1.5}), "top_k", "an integer from -1"),
        (
            json!({"logit_bias": {"5": 101}}),
            "logit_bias.5",
            "from -100 to 100",
        ),
        (
            json!({"stop_token_ids": [1, "a"]}),
            "stop_token_ids[1]",
            "an integer",
        ),
        (json!({"stream": 1}), "stream", "a boolean"),
    ];
    for (request, param, words) in cases {
        let error = said(&body(&request).part::<Sampling>().unwrap_err());
        assert_eq!(error["error"]["param"], param, "{error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            message.contains(words) && !message.contains(" line "),
            "{message}"
        );
    }
    let request = json!({"messages": [{"role": "user"}, {"content": "a"}]});
    let error = said(&body(&request).part::<Conversation>().unwrap_err());
    assert_eq!(error["error"]["param"], "messages[1].role");
    assert_eq!(error["error"]["message"], "messages[1].role: it is missing");
}

#[test]
fn numbers_are_taken_as_clients_write_them() {
    let request = json!({"top_k": 5.0, "temperature": 1, "repetition_penalty": 1e-60, "seed": -3, "logit_bias": {"7": 1}});
    let fields: Sampling = body(&request).part().unwrap();
    assert_eq!(fields.top_k, Some(Int(5)));
    assert_eq!(fields.temperature, Some(Number(1.0)));
    assert_eq!(fields.repetition_penalty, Some(Positive(f32::MIN_POSITIVE)));
    assert_eq!(fields.seed, Some(Int(-3)));
    assert_eq!(
        fields.logit_bias.unwrap().0,
        [(BiasedToken::Id("7".into()), Bias(1.0))]
    );
}

#[test]
fn biases_come_in_several_forms() {
    let biases = |value: Value| {
        let read = body(&json!({"logit_bias": value})).part::<Sampling>();
        read.map(|fields| fields.logit_bias.unwrap().0)
    };
    let id = |id: &str| BiasedToken::Id(id.into());
    let text = |text: &str| BiasedToken::Text(text.into());
    let listed = biases(json!([[5, 1.5], ["7", false], [" cat", -100]])).unwrap();
    assert_eq!(
        listed,
        [
            (id("5"), Bias(1.5)),
            (text("7"), Bias(f32::NEG_INFINITY)),
            (text(" cat"), Bias(-100.0))
        ]
    );
    let named = biases(json!({"5": false, "cat": 1})).unwrap();
    assert_eq!(
        named,
        [(id("5"), Bias(f32::NEG_INFINITY)), (text("cat"), Bias(1.0))]
    );
    for (wrong, param) in [
        (json!({"5": true}), "logit_bias.5"),
        (json!([[5, 101]]), "logit_bias[0][1]"),
        (json!([[-5, 1]]), "logit_bias[0][0]"),
        (json!([[5]]), "logit_bias[0]"),
        (json!([5]), "logit_bias[0]"),
        (json!(5), "logit_bias"),
    ] {
        let error = said(&biases(wrong).unwrap_err());
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[test]
fn native_prompts_may_mix_tokens_and_texts() {
    let prompts = |value: Value| {
        let read = body(&json!({"prompt": value})).part::<LlamaCppCompletion>();
        read.map(|fields| (fields.prompt.list, fields.prompt.listed))
    };
    let text = |text: &str| PromptPart::Text(text.into());
    let tokens = |ids: &[u32]| PromptPart::Tokens(ids.into());
    let one = |parts: Vec<PromptPart>| (vec![LlamaCppPrompt(parts)], false);
    let cases = [
        (json!("a"), one(vec![text("a")])),
        (json!([1, 2]), one(vec![tokens(&[1, 2])])),
        (
            json!([1, 2, "a", "b", 3]),
            one(vec![tokens(&[1, 2]), text("a"), text("b"), tokens(&[3])]),
        ),
        (json!(["a", 1]), one(vec![text("a"), tokens(&[1])])),
        (json!({"prompt_string": "a"}), one(vec![text("a")])),
        (
            json!(["a", [1, "b"], {"prompt_string": "c", "multimodal_data": []}]),
            (
                vec![
                    LlamaCppPrompt(vec![text("a")]),
                    LlamaCppPrompt(vec![tokens(&[1]), text("b")]),
                    LlamaCppPrompt(vec![text("c")]),
                ],
                true,
            ),
        ),
        (json!([]), (vec![], true)),
    ];
    for (value, expected) in cases {
        assert_eq!(prompts(value.clone()).unwrap(), expected, "{value}");
    }
    for (wrong, param) in [
        (json!(1), "prompt"),
        (json!([1, [2]]), "prompt"),
        (json!([[1, [2]]]), "prompt[0]"),
        (json!([-1]), "prompt[0]"),
        (json!(["a", 1.5]), "prompt[1]"),
        (json!({"multimodal_data": []}), "prompt.prompt_string"),
        (
            json!({"prompt_string": "a", "multimodal_data": ["AA=="]}),
            "prompt",
        ),
    ] {
        let error = said(&prompts(wrong).unwrap_err());
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[test]
fn prompts_come_in_four_forms() {
    let prompts = |value: Value| {
        let read = body(&json!({"prompt": value})).part::<Completion>();
        read.map(|fields| (fields.prompt.list, fields.prompt.listed))
    };
    let text = |text: &str| Prompt::Text(text.into());
    let tokens = |ids: &[u32]| Prompt::Tokens(ids.into());
    assert_eq!(prompts(json!("a")).unwrap(), (vec![text("a")], false));
    assert_eq!(
        prompts(json!([1, 2])).unwrap(),
        (vec![tokens(&[1, 2])], false)
    );
    let two = (vec![text("a"), tokens(&[1])], true);
    assert_eq!(prompts(json!(["a", [1]])).unwrap(), two);
    assert_eq!(prompts(json!([])).unwrap(), (vec![], true));
    for (wrong, param) in [
        (json!(["a", 1]), "prompt"),
        (json!([1, "a"]), "prompt[1]"),
        (json!([[1], [-1]]), "prompt[1][0]"),
        (json!({}), "prompt"),
    ] {
        let error = said(&prompts(wrong).unwrap_err());
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[test]
fn arguments_are_objects_as_text_or_not() {
    let call = |arguments: Value| {
        let call = json!({"id": "1", "function": {"name": "f", "arguments": arguments}});
        let message = json!({"role": "assistant", "tool_calls": [call]});
        let mut body = body(&json!({"messages": [message]}));
        let fields = body.part::<Conversation>()?;
        let message = fields.messages.unwrap().0.pop().unwrap();
        let call = message.tool_calls.unwrap().0.pop().unwrap();
        Ok::<_, ApiError>(Value::from(call.function.arguments.unwrap_or_default().0))
    };
    assert_eq!(call(json!("{\"a\": 1}")).unwrap(), json!({"a": 1}));
    assert_eq!(call(json!({"a": 1})).unwrap(), json!({"a": 1}));
    // What was cut off comes back, too.
    for text in [" ", "{\"a\": 1", "[]", "no"] {
        assert_eq!(call(json!(text)).unwrap(), json!({}), "{text}");
    }
    for wrong in [json!(5), json!([])] {
        let error = said(&call(wrong).unwrap_err());
        let param = "messages[0].tool_calls[0].function.arguments";
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

/// What is longer than it may be is refused before it takes memory.
#[test]
fn lists_and_objects_are_bounded() {
    let many = vec![json!({"role": "user", "content": "a"}); MAX_MESSAGES + 1];
    let error = body(&json!({"messages": many})).part::<Conversation>();
    assert!(error.unwrap_err().to_string().contains("at most 4096"));
    let schema = json!({"response_format": {"type": "json_schema", "schema": {"enum": ["x".repeat(300_000)]}}});
    let error = body(&schema).part::<StructuredOutputFields>().unwrap_err();
    assert!(error.to_string().contains("expected at most 262144"));
    // What is looked at is not followed deeper than JSON's parser goes.
    let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
    let deep = format!("{{\"user\": {deep}, \"chat_template_kwargs\": {{\"a\": {deep}}}}}");
    let mut deep = Body::new(deep.into_bytes(), None).unwrap();
    assert!(deep.part::<Standing>().is_ok());
    let error = deep.part::<Conversation>().unwrap_err().to_string();
    assert!(error.contains("recursion limit"), "{error}");
    let many: Value = (0..1000).map(|i| (format!("f{i}"), json!(1))).collect();
    assert!(Body::new(many.to_string().into_bytes(), None).is_err());
}

#[test]
fn bodies_are_objects() {
    for (text, words) in [
        ("[]", "expected an object"),
        ("{", "not JSON"),
        ("{}x", "not JSON"),
        ("", "not JSON"),
    ] {
        let error = Body::new(text.into(), None).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(Body::new(vec![b'"', 0xff, b'"'], None).is_err());
}
