//! `/v1/completions`, `/tokenize` and `/detokenize`.

use super::Running;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

fn text(answer: &Value, choice: usize) -> &str {
    answer["choices"][choice]["text"].as_str().unwrap()
}

/// Why a request is refused.
fn refused(server: &Running, body: &Value) -> Value {
    let reply = server.post(PATH, body);
    assert_eq!(reply.status, 400, "{body}");
    reply.json()["error"].take()
}

#[test]
fn texts_and_tokens_give_the_same_answer() {
    let server = Running::demo();
    let prompt = "Once upon a time";
    let tokens = server.ask(
        "/tokenize",
        &json!({"prompt": prompt, "return_token_strs": true}),
    );
    let ids = tokens["tokens"].clone();
    assert_eq!(tokens["count"], ids.as_array().unwrap().len());
    let strings = tokens["token_strs"].as_array().unwrap().iter();
    assert_eq!(
        strings.map(|s| s.as_str().unwrap()).collect::<String>(),
        prompt
    );
    let back = server.ask("/detokenize", &json!({"tokens": ids}));
    assert_eq!(back["prompt"], prompt);

    let by_text = server.ask(
        PATH,
        &json!({"model": "demo", "prompt": prompt, "max_tokens": 8}),
    );
    assert_eq!(by_text["object"], "text_completion");
    assert_eq!(by_text["choices"][0]["finish_reason"], "length");
    assert_eq!(by_text["choices"][0]["logprobs"], Value::Null);
    assert_eq!(by_text["usage"]["completion_tokens"], 8);
    assert_eq!(by_text["usage"]["prompt_tokens"], tokens["count"]);
    let expected = text(&by_text, 0);
    assert!(!expected.is_empty());
    for prompt in [json!(ids), json!([prompt]), json!([ids])] {
        let answer = server.ask(PATH, &json!({"prompt": prompt, "max_tokens": 8}));
        assert_eq!(text(&answer, 0), expected, "{prompt}");
    }
    let mut both = json!({"prompt": ["What is", prompt], "max_tokens": 8, "n": 2, "seed": 1});
    both["ignore_eos"] = true.into();
    let both = server.ask(PATH, &both);
    assert_eq!(both["choices"].as_array().unwrap().len(), 4);
    for (i, choice) in both["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["index"], i);
    }
    // The temperature of these tests is 0 unless a request asks for another, so choices of one prompt are equal.
    assert_eq!((text(&both, 2), text(&both, 3)), (expected, expected));
    assert_eq!(both["usage"]["completion_tokens"], 32);
}

#[test]
fn echoes_with_log_probabilities_cover_prompt_and_answer() {
    let server = Running::demo();
    let prompt = "Once upon a time, there";
    let body = json!({"prompt": prompt, "max_tokens": 3, "echo": true, "logprobs": 2});
    let answer = server.ask(PATH, &body);
    let whole = text(&answer, 0);
    assert!(
        whole.starts_with(prompt) && whole.len() > prompt.len(),
        "{whole}"
    );
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let tokens = list("tokens");
    let joined: String = tokens.iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(joined, whole);
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(tokens.len(), prompt_tokens + 3);
    let (values, tops, offsets) = (
        list("token_logprobs"),
        list("top_logprobs"),
        list("text_offset"),
    );
    assert_eq!(
        (values.len(), tops.len(), offsets.len()),
        (tokens.len(), tokens.len(), tokens.len())
    );
    assert_eq!(
        (&values[0], &tops[0], &offsets[0]),
        (&Value::Null, &Value::Null, &json!(0))
    );
    let mut at = 0;
    for i in 0..tokens.len() {
        assert_eq!(offsets[i], at);
        let token = tokens[i].as_str().unwrap();
        at += token.chars().count();
        if i > 0 {
            assert!(values[i].as_f64().unwrap() <= 0.0);
            assert_eq!(
                tops[i][token], values[i],
                "the token that is there is listed"
            );
        }
    }

    // Scoring: nothing is generated.
    let body = json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 0});
    let scored = server.ask(PATH, &body);
    assert_eq!(text(&scored, 0), prompt);
    let again = scored["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(again[..], values[..prompt_tokens]);
    assert_eq!(scored["usage"]["completion_tokens"], 0);
}

#[test]
fn the_token_that_ends_an_answer_is_listed_and_not_said() {
    let server = Running::demo();
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let prompt = server.ask("/tokenize", &json!({"messages": messages}));
    let body = json!({"prompt": prompt["tokens"], "max_tokens": 40, "logprobs": 1});
    let answer = server.ask(PATH, &body);
    assert_eq!(text(&answer, 0), "7 plus 5 is 12.");
    let tokens = answer["choices"][0]["logprobs"]["tokens"]
        .as_array()
        .unwrap();
    assert_eq!(*tokens.last().unwrap(), "<|im_end|>");
    let said = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(tokens.len(), said);
    // Who scores a prompt and takes one token more finds one more, whatever it is.
    let mut prompt = prompt["tokens"].as_array().unwrap().clone();
    let answered = server.ask(
        "/tokenize",
        &json!({"prompt": "7 plus 5 is 12.", "add_special_tokens": false}),
    );
    prompt.extend(answered["tokens"].as_array().unwrap().iter().cloned());
    let body = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": true});
    let scored = server.ask(PATH, &body);
    let scored = scored["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(scored.len(), prompt.len() + 1);
}

#[test]
fn a_prompt_is_scored_beside_its_answer() {
    let server = Running::demo();
    let prompt = "Once upon a time, there";
    let ids = server.ask("/tokenize", &json!({"prompt": prompt}))["tokens"].clone();
    let mut body = json!({"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 2, "echo": true, "logprobs": 0});
    let answer = server.ask(PATH, &body);
    let choice = &answer["choices"][0];
    let scored = choice["prompt_logprobs"].as_array().unwrap();
    let ids = ids.as_array().unwrap();
    assert_eq!(scored.len(), ids.len());
    assert_eq!(scored[0], Value::Null);
    for (i, (entry, id)) in scored.iter().zip(ids).enumerate().skip(1) {
        let own = &entry[id.to_string()];
        assert_eq!(own["logprob"], choice["logprobs"]["token_logprobs"][i]);
        assert_eq!(own["decoded_token"], choice["logprobs"]["tokens"][i]);
        let tops = choice["logprobs"]["top_logprobs"][i].as_object().unwrap();
        assert_eq!(tops.len(), 1, "each list has what was asked of it");
        let entry = entry.as_object().unwrap();
        let mut ranks: Vec<_> = entry
            .values()
            .map(|e| e["rank"].as_u64().unwrap())
            .collect();
        ranks.sort_unstable();
        assert_eq!(ranks[..2], [1, 2]);
        assert_eq!(
            entry.len(),
            if own["rank"].as_u64() > Some(2) { 3 } else { 2 }
        );
    }
    body["stream"] = true.into();
    assert_eq!(refused(&server, &body)["param"], "prompt_logprobs");
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let body = json!({"messages": messages, "max_tokens": 1, "prompt_logprobs": 0});
    let chat = server.ask("/v1/chat/completions", &body);
    let scored = chat["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scored.len(), 16);
    assert_eq!(scored[3].as_object().unwrap().len(), 1);
}

#[test]
fn prompts_are_cut_at_their_beginning() {
    let server = Running::demo();
    let ids: Vec<u32> = (300..340).collect();
    let ask = |prompt: &[u32], last: i64| {
        let body = json!({"prompt": prompt, "max_tokens": 4, "truncate_prompt_tokens": last});
        server.ask(PATH, &body)
    };
    let cut = ask(&ids, 5);
    assert_eq!(cut["usage"]["prompt_tokens"], 5);
    assert_eq!(text(&cut, 0), text(&ask(&ids[35..], 100), 0));
    // -1: what leaves room for an answer, if only for its least.
    let long: Vec<u32> = (0..3000).map(|i| 300 + i % 40).collect();
    let models = server.get("/v1/models").json();
    let context = models["data"][0]["max_model_len"].as_u64().unwrap();
    let cut = ask(&long, -1);
    assert_eq!(cut["usage"]["prompt_tokens"], context - 1);
    assert_eq!(cut["usage"]["total_tokens"], context);
    let vectors = json!({"input": [long, ids], "truncate_prompt_tokens": -1});
    let vectors = server.ask("/v1/embeddings", &vectors);
    assert_eq!(vectors["usage"]["prompt_tokens"], context + 40);
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let body = json!({"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 6});
    let chat = server.ask("/v1/chat/completions", &body);
    assert_eq!(chat["usage"]["prompt_tokens"], 6);
    let body = json!({"prompt": "a", "truncate_prompt_tokens": 0});
    assert_eq!(refused(&server, &body)["param"], "truncate_prompt_tokens");
}

#[test]
fn prompt_and_answer_have_the_context_together() {
    let server = Running::demo();
    let models = server.get("/v1/models").json();
    let context = models["data"][0]["max_model_len"].as_u64().unwrap();
    let prompt = |tokens: u64| vec![300; tokens as usize];
    let body = json!({"prompt": prompt(context - 3), "max_tokens": 50, "ignore_eos": true});
    let answer = server.ask(PATH, &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], context);
    let error = refused(
        &server,
        &json!({"prompt": prompt(context), "max_tokens": 1}),
    );
    assert_eq!(error["code"], "context_length_exceeded");
    let words = format!("This model's maximum context length is {context} tokens.");
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with(&words), "{message}");
    assert!(message.contains("leaves none for an answer"), "{message}");
    server.ask(
        PATH,
        &json!({"prompt": prompt(context), "max_tokens": 0, "echo": true}),
    );
}

#[test]
fn streams_come_to_the_whole_answer() {
    let server = Running::demo();
    let mut body = json!({
        "prompt": ["Once upon a time", "What is 7 plus 5?"],
        "max_tokens": 12,
        "echo": true,
        "logprobs": 1,
        "stop": ["."],
        "temperature": 0.8,
        "seed": 7,
        "n": 2,
    });
    let whole = server.ask(PATH, &body);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let chunks = server.stream(PATH, &body);
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][field], whole["usage"][field]);
    }
    for (i, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let mine = || {
            chunks
                .iter()
                .map(|c| &c["choices"][0])
                .filter(|c| c["index"] == i)
        };
        let streamed: String = mine().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(expected["text"], streamed);
        let lists = |c: &Value| c["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        let streamed: Vec<_> = mine().flat_map(lists).collect();
        assert_eq!(
            expected["logprobs"]["token_logprobs"],
            Value::Array(streamed)
        );
        let reasons: Vec<_> = mine()
            .map(|c| &c["finish_reason"])
            .filter(|r| !r.is_null())
            .collect();
        assert_eq!(reasons, [&expected["finish_reason"]]);
    }
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()));
}

#[test]
fn an_answer_ends_before_its_stop() {
    let server = Running::demo();
    let body = json!({"prompt": "Once upon a time", "max_tokens": 60});
    let free = server.ask(PATH, &body);
    let free = text(&free, 0).to_owned();
    let stop: String = free.split_whitespace().nth(4).unwrap().into();
    for stops in [json!(stop), json!(["never said", stop])] {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 60, "stop": stops});
        let answer = server.ask(PATH, &body);
        assert_eq!(text(&answer, 0), &free[..free.find(&stop).unwrap()]);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn what_bends_the_choice_of_tokens_bends_it() {
    let server = Running::demo();
    let prompt = "Once upon a time";
    let plain = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 1});
    let plain = server.ask(PATH, &plain);
    let first = text(&plain, 0).to_owned();
    let id = server.ask(
        "/tokenize",
        &json!({"prompt": first, "add_special_tokens": false}),
    );
    let id = id["tokens"][0].to_string();
    let body = json!({"prompt": prompt, "max_tokens": 1, "logit_bias": {id: -100}});
    assert_ne!(text(&server.ask(PATH, &body), 0), first);
    let sampled = |seed: u64| {
        let body = json!({
            "prompt": prompt, "max_tokens": 16, "temperature": 2.0, "seed": seed, "top_k": -1,
            "top_p": 1, "min_p": 0, "repetition_penalty": 1.1, "xtc_probability": 0.5,
        });
        let answer = server.ask(PATH, &body);
        text(&answer, 0).to_owned()
    };
    assert_eq!(sampled(3), sampled(3));
    assert_ne!(sampled(3), sampled(4));
}

/// Without a seed each prompt of a request has a random sequence of its own; with one they are alike.
#[test]
fn prompts_do_not_share_their_randomness() {
    let server = Running::demo();
    let mut body = json!({"prompt": ["Once upon a time", "Once upon a time"], "temperature": 1.5,
        "top_p": 1, "min_p": 0, "max_tokens": 24});
    let texts = |body: &Value| {
        let whole = server.ask("/v1/completions", body);
        [0, 1].map(|i| whole["choices"][i]["text"].clone())
    };
    let [one, other] = texts(&body);
    assert_ne!(one, other);
    body["seed"] = 7.into();
    let [one, other] = texts(&body);
    assert_eq!(one, other);
}

/// What clients send where nothing was asked.
#[test]
fn an_empty_stop_string_is_none_and_the_smallest_nucleus_is_one_token() {
    let server = Running::demo();
    let text = |more: Value| {
        let mut body = json!({"prompt": "Once upon a time", "max_tokens": 24});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ask(PATH, &body)["choices"][0]["text"].clone()
    };
    let greedy = text(json!({"temperature": 0}));
    for stop in [json!(""), json!([""]), json!(["", "no such text"])] {
        assert_eq!(text(json!({"temperature": 0, "stop": stop})), greedy);
    }
    let stop = greedy.as_str().unwrap().split(' ').next_back().unwrap();
    let cut = text(json!({"temperature": 0, "stop": ["", stop]}));
    assert_ne!(cut, greedy);
    assert_eq!(text(json!({"temperature": 0, "grammar": ""})), greedy);
    assert_eq!(
        text(json!({"temperature": 2, "seed": 1, "top_p": 0})),
        greedy
    );
    assert_ne!(text(json!({"temperature": 2, "seed": 1})), greedy);
}
