//! llama.cpp's own routes: `/completion` and `/slots`.

use super::faults::{Breaking, Then};
use super::hooked::hooked;
use super::{CONTEXT, Running, demo_model};
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const PATH: &str = "/completion";
const STORY: &str = "Once upon a time";

/// The chunks of a streamed answer: the last says that it is the last, and nothing follows.
fn chunks(server: &Running, path: &str, body: &Value) -> Vec<Value> {
    let events = server.written_events(path, body);
    let read = |event: &String| {
        let data = event.strip_prefix("data: ").unwrap();
        serde_json::from_str(data).unwrap()
    };
    events.iter().map(read).collect()
}

fn ids(server: &Running, text: &str) -> Vec<u64> {
    let body = json!({"prompt": text, "add_special_tokens": false});
    let tokens = server.ask("/tokenize", &body)["tokens"].clone();
    let tokens = tokens.as_array().unwrap().iter();
    tokens.map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn an_answer_tells_all_about_itself() {
    let server = Running::demo();
    let body = json!({"prompt": STORY, "n_predict": 8, "return_tokens": true, "n_probs": 2,
        "cache_prompt": true, "id_slot": -1, "n_keep": 0});
    let reply = server.post(PATH, &body);
    assert_eq!(reply.header("x-ferrum-ignored"), None);
    let answer = reply.json();
    let openai = server.ask(
        "/v1/completions",
        &json!({"prompt": STORY, "max_tokens": 8}),
    );
    assert_eq!(answer["content"], openai["choices"][0]["text"]);
    let prompt = ids(&server, STORY).len();
    let expected = json!({
        "index": 0, "stop": true, "stop_type": "limit", "stopping_word": "", "model": "demo",
        "tokens_predicted": 8, "tokens_evaluated": prompt, "prompt": STORY, "truncated": false,
        "has_new_line": false,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(answer[name], *value, "{name}");
    }
    let said = server.ask("/detokenize", &json!({"tokens": answer["tokens"]}));
    assert_eq!(said["prompt"], answer["content"]);
    let settings = &answer["generation_settings"];
    assert_eq!(
        (&settings["n_predict"], &settings["n_ctx"]),
        (&json!(8), &json!(CONTEXT))
    );
    assert_eq!(
        (&settings["seed"], &settings["top_k"]),
        (&json!(-1), &json!(0))
    );
    let timings = &answer["timings"];
    assert_eq!(
        (&timings["predicted_n"], &timings["cache_n"]),
        (&json!(8), &json!(0))
    );
    assert_eq!(timings["prompt_n"], prompt);
    assert!(timings["predicted_per_second"].as_f64().unwrap() > 0.0);
    let probs = answer["completion_probabilities"].as_array().unwrap();
    assert_eq!(probs.len(), 8);
    for (prob, token) in probs.iter().zip(answer["tokens"].as_array().unwrap()) {
        assert_eq!(prob["id"], *token);
        let top = prob["top_logprobs"].as_array().unwrap();
        // The best is what was chosen: nothing was sampled.
        assert_eq!((top.len(), &top[0]["id"]), (2, token));
        assert_eq!(top[0]["logprob"], prob["logprob"]);
        assert!(prob["token"].is_string() && prob["bytes"].is_array());
    }
    // What is not asked for is not there.
    let plain = server.ask(PATH, &json!({"prompt": STORY, "n_predict": 2}));
    assert_eq!(plain["tokens"], json!([]));
    assert!(plain.get("completion_probabilities").is_none());
    let fields = json!(["content", "timings/predicted_n", "nothing"]);
    let some = json!({"prompt": STORY, "n_predict": 2, "response_fields": fields});
    let some = server.ask(PATH, &some);
    let expected = json!({"content": plain["content"], "timings/predicted_n": 2});
    assert_eq!(some, expected);
}

#[test]
fn an_answer_says_why_it_ended() {
    let server = Running::demo();
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let asked = server.ask("/apply-template", &json!({"messages": messages}))["prompt"].clone();
    let free = server.ask(PATH, &json!({"prompt": STORY, "n_predict": 40}));
    let word = free["content"]
        .as_str()
        .unwrap()
        .split_whitespace()
        .nth(4)
        .unwrap();
    // Body, how it ends, at which word, and whether it is cut off by the context.
    let cases = [
        (json!({"prompt": asked, "n_predict": -1}), "eos", "", false),
        (
            json!({"prompt": STORY, "n_predict": 40, "stop": [word, ""]}),
            "word",
            word,
            false,
        ),
        (json!({"prompt": STORY, "n_predict": 0}), "limit", "", false),
        (
            json!({"prompt": STORY, "ignore_eos": true}),
            "limit",
            "",
            true,
        ),
        (
            json!({"prompt": STORY, "n_predict": 9, "grammar": "root ::= \" a\""}),
            "eos",
            "",
            false,
        ),
    ];
    for (body, kind, word, truncated) in cases {
        let answer = server.ask(PATH, &body);
        assert_eq!(answer["stop_type"], kind, "{body}");
        assert_eq!(answer["stopping_word"], word, "{body}");
        assert_eq!(answer["truncated"], truncated, "{body}");
        let said = answer["content"].as_str().unwrap();
        match (kind, body.get("grammar")) {
            ("word", _) => assert!(free["content"].as_str().unwrap().starts_with(said)),
            ("eos", Some(_)) => assert_eq!(said, " a"),
            ("eos", None) => assert_eq!(said, "7 plus 5 is 12."),
            _ => assert_eq!(said.is_empty(), body["n_predict"] == 0),
        }
    }
    // The prompt that was only computed is in the cache.
    let answer = server.ask(PATH, &json!({"prompt": "a ".repeat(100), "n_predict": 0}));
    assert_eq!(answer["tokens_predicted"], 0);
    let again = server.ask(PATH, &json!({"prompt": "a ".repeat(100), "n_predict": 1}));
    let cached = again["tokens_cached"].as_u64().unwrap();
    assert!(cached > 50, "{again}");
    assert_eq!(again["timings"]["cache_n"], cached);
    let computed = again["timings"]["prompt_n"].as_u64().unwrap();
    assert_eq!(again["tokens_evaluated"], computed + cached);
}

#[test]
fn streams_come_to_the_whole_answer() {
    let server = Running::demo();
    let mut body = json!({"prompt": [STORY, "What is 7 plus 5?"], "n_predict": 12, "stop": ["."],
        "temperature": 0.8, "seed": 7, "n_probs": 1, "return_tokens": true});
    let whole = server.ask(PATH, &body);
    body["stream"] = true.into();
    body["timings_per_token"] = true.into();
    let streamed = chunks(&server, PATH, &body);
    for (index, whole) in whole.as_array().unwrap().iter().enumerate() {
        assert_eq!(whole["index"], index);
        let mine: Vec<_> = streamed
            .iter()
            .filter(|chunk| chunk["index"] == index)
            .collect();
        let (last, parts) = mine.split_last().unwrap();
        let said: String = parts
            .iter()
            .map(|part| part["content"].as_str().unwrap())
            .collect();
        assert_eq!(whole["content"], said);
        let lists = |name: &str| {
            let all = parts
                .iter()
                .flat_map(|part| part[name].as_array().unwrap().clone());
            Value::Array(all.collect())
        };
        assert_eq!(
            lists("completion_probabilities"),
            whole["completion_probabilities"]
        );
        assert_eq!(lists("tokens"), whole["tokens"]);
        for part in parts {
            assert_eq!(part["stop"], false);
            assert!(part["timings"]["predicted_n"].as_u64().unwrap() > 0);
        }
        assert_eq!(
            (&last["stop"], &last["content"]),
            (&json!(true), &json!(""))
        );
        for same in ["stop_type", "stopping_word", "tokens_predicted", "prompt"] {
            assert_eq!(last[same], whole[same], "{same}");
        }
    }
    assert_eq!(
        streamed
            .iter()
            .filter(|chunk| chunk["stop"] == true)
            .count(),
        2
    );
    body["response_fields"] = json!(["stop_type"]);
    body["prompt"] = STORY.into();
    let streamed = chunks(&server, PATH, &body);
    let last = streamed.last().unwrap().as_object().unwrap();
    assert_eq!(last.keys().collect::<Vec<_>>(), ["stop_type"]);
}

#[test]
fn prompts_come_in_many_forms() {
    let server = Running::demo();
    let ask = |prompt: Value| server.ask(PATH, &json!({"prompt": prompt, "n_predict": 6}));
    let expected = ask(json!(STORY))["content"].clone();
    let tokens = ids(&server, STORY);
    let mut mixed: Vec<Value> = ids(&server, "Once").into_iter().map(Value::from).collect();
    mixed.push(" upon a time".into());
    for prompt in [
        json!(tokens),
        json!([STORY]),
        json!([tokens]),
        json!(mixed),
        json!([mixed]),
        json!({"prompt_string": STORY}),
    ] {
        assert_eq!(ask(prompt.clone())["content"], expected, "{prompt}");
    }
    let several = ask(json!(["What is", mixed, {"prompt_string": STORY}]));
    let several = several.as_array().unwrap();
    assert_eq!(several.len(), 3);
    assert_eq!(
        (&several[1]["content"], &several[2]["content"]),
        (&expected, &expected)
    );
    assert_eq!(several[0]["prompt"], "What is");
    let twice = json!({"prompt": STORY, "n_predict": 6, "n_cmpl": 2});
    let twice = server.ask(PATH, &twice);
    assert_eq!(
        (&twice[0]["content"], &twice[1]["content"]),
        (&expected, &expected)
    );
    // The route of that name without a version is OpenAI's.
    let openai = server.ask("/completions", &json!({"prompt": STORY, "max_tokens": 6}));
    assert_eq!(openai["choices"][0]["text"], expected);
}

#[test]
fn samplers_and_biases_bend_the_choice() {
    let server = Running::demo();
    let say = |more: Value| {
        let mut body = json!({"prompt": STORY, "n_predict": 24, "seed": 3});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ask(PATH, &body)
    };
    let content = |more: Value| say(more)["content"].clone();
    let greedy = content(json!({}));
    let first = say(json!({"n_predict": 1, "return_tokens": true}))["tokens"][0].clone();
    let word = server.ask("/detokenize", &json!({"tokens": [first]}))["prompt"].clone();
    for bias in [
        json!([[first, false]]),
        json!([[first, -100]]),
        json!([[word, false]]),
        json!({word.as_str().unwrap(): -100}),
        json!({first.to_string(): false}),
    ] {
        let other = say(json!({"logit_bias": bias, "n_predict": 1, "return_tokens": true}));
        assert_ne!(other["tokens"][0], first, "{bias}");
    }
    // Without the temperature among the samplers there is none; with only the best token left, it does not matter.
    let hot = json!({"temperature": 1.9, "top_k": 1, "samplers": ["top_k", "temperature"]});
    assert_eq!(content(hot), greedy);
    let settings = |more: Value| say(more)["generation_settings"].clone();
    let kept =
        settings(json!({"samplers": ["min_p"], "min_p": 0.5, "top_k": 7, "repeat_penalty": 1.5}));
    let of = |name: &str| kept[name].as_f64().unwrap();
    assert_eq!((of("min_p"), of("top_k")), (0.5, 0.0));
    assert_eq!((of("temperature"), of("repeat_penalty")), (1.0, 1.0));
    // A seed of -1 is none.
    let random = json!({"temperature": 1.5, "seed": -1});
    assert_ne!(content(random.clone()), content(random));
    let schema = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]});
    let formed = content(json!({"json_schema": schema, "grammar": ""}));
    assert_eq!(
        serde_json::from_str::<Value>(formed.as_str().unwrap()).unwrap(),
        json!({"a": 1})
    );
}

#[test]
fn what_is_not_followed_is_told() {
    let server = Running::demo();
    let cases = [
        (json!({"dynatemp_range": 0.5}), Some("dynatemp_range")),
        (
            json!({"samplers": ["temperature", "top_k", "infill"]}),
            Some("samplers[2]"),
        ),
        (
            json!({"samplers": ["top_k", "temperature"]}),
            Some("samplers"),
        ),
        (json!({"samplers": "kt"}), Some("samplers")),
        (
            json!({"n_indent": 2, "min_keep": 1}),
            Some("min_keep, n_indent"),
        ),
        (
            json!({"t_max_predict_ms": 1000, "n_cmpl": 2}),
            Some("t_max_predict_ms"),
        ),
        (
            json!({"t_max_predict_ms": 1000, "samplers": ["dry", "top_k", "xtc"]}),
            None,
        ),
        (
            json!({"repeat_last_n": 64, "n_keep": 4, "cache_prompt": false}),
            None,
        ),
    ];
    for (more, names) in cases {
        let mut body = json!({"prompt": "a", "n_predict": 2});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(PATH, &body);
        assert_eq!(reply.status, 200, "{body}");
        assert_eq!(reply.header("x-ferrum-ignored"), names, "{body}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::demo();
    let cases = [
        (json!({"prompt": null}), "prompt", "missing"),
        (json!({"prompt": []}), "prompt", "found 0 prompts"),
        (json!({"prompt": [[]]}), "prompt[0]", "no token"),
        (json!({"prompt": [5, 99999]}), "prompt[1]", "from 0 to 1279"),
        (
            json!({"prompt": 5}),
            "prompt",
            "expected a string, an object",
        ),
        (
            json!({"prompt": vec![7; 600]}),
            "prompt",
            "maximum context length is 512",
        ),
        (
            json!({"prompt": {"prompt_string": "a", "multimodal_data": ["AA"]}}),
            "prompt",
            "text only",
        ),
        (json!({"n_predict": -2}), "n_predict", "at least -1"),
        (json!({"n_probs": 21}), "n_probs", "from 0 to 20"),
        (json!({"stop": 5}), "stop", "a string or an array"),
        (json!({"stop": vec!["a"; 17]}), "stop", "at most 16"),
        (json!({"n_cmpl": 0}), "n_cmpl", "at least 1"),
        (
            json!({"n_cmpl": 65, "prompt": ["a", "b"]}),
            "n_cmpl",
            "found 130 answers",
        ),
        (json!({"temperature": 3}), "temperature", "from 0 to 2"),
        (
            json!({"logit_bias": [[1280, 1]]}),
            "logit_bias.1280",
            "below 1280",
        ),
        (
            json!({"grammar": "root ::= \"a\"", "json_schema": {}}),
            "json_schema",
            "contradicts",
        ),
        (json!({"grammar": "root ::= ["}), "grammar", ""),
        (
            json!({"response_fields": "content"}),
            "response_fields",
            "array",
        ),
    ];
    for (fields, param, words) in cases {
        let mut body = json!({"prompt": "a"});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(PATH, &body);
        let status = reply.status;
        let answer = reply.json();
        assert_eq!(status, 400, "{body}: {answer}");
        assert_eq!(answer["error"]["param"], param, "{body}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{body}: {message}");
    }
}

/// An answer whose time is over ends when it has a line break, as if it had all its tokens.
#[test]
fn an_answer_ends_when_its_time_is_over() {
    let server = Running::demo();
    let mut body = json!({"prompt": STORY, "n_predict": 400, "ignore_eos": true, "t_max_predict_ms": 1,
        "grammar": "root ::= (\" a\\n\")*"});
    let whole = server.ask(PATH, &body);
    assert_eq!(
        (&whole["stop_type"], &whole["has_new_line"]),
        (&json!("limit"), &json!(true))
    );
    assert!(whole["tokens_predicted"].as_u64().unwrap() < 400, "{whole}");
    body["stream"] = true.into();
    let streamed = chunks(&server, PATH, &body);
    let last = streamed.last().unwrap();
    assert_eq!(
        (&last["stop"], &last["stop_type"]),
        (&json!(true), &json!("limit"))
    );
    assert_eq!(last["truncated"], false);
    // Without a line break it goes on.
    body["grammar"] = "root ::= \" a\" (\" a\")*".into();
    body["n_predict"] = 40.into();
    let whole = chunks(&server, PATH, &body);
    assert_eq!(whole.last().unwrap()["tokens_predicted"], 40);
    // The engine has let go of it.
    server.until(|stats| stats.running == 0 && stats.waiting == 0);
}

#[test]
fn slots_show_what_is_answered_and_no_text() {
    let (model, text) = demo_model();
    let gate = Arc::new(Mutex::new(()));
    let then = Then::Hang(Arc::clone(&gate));
    let engine = (EngineConfig::default(), 2);
    let server = Running::with(model, text, ServerConfig::default(), engine, |inner| {
        hooked(
            inner,
            Breaking {
                good_steps: 12,
                then,
                nan: false,
                _life: Arc::default(),
            },
        )
    });
    let idle = server.get("/slots").json();
    assert_eq!(idle.as_array().unwrap().len(), 2);
    for (i, slot) in idle.as_array().unwrap().iter().enumerate() {
        let expected =
            json!({"id": i, "n_ctx": CONTEXT, "speculative": false, "is_processing": false});
        assert_eq!(*slot, expected);
    }
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 200);
    let busy = || {
        let slots = server.get("/slots").json();
        let slots = slots.as_array().unwrap().clone();
        let busy = slots
            .into_iter()
            .filter(|slot| slot["is_processing"] == true);
        busy.collect::<Vec<_>>()
    };
    let held = gate.lock().unwrap();
    let body = json!({"prompt": "A secret", "n_predict": 90, "n_cmpl": 2, "ignore_eos": true,
        "stream": true, "top_k": 9, "temperature": 1, "stop": ["never said"]});
    let mut stream = server.post(PATH, &body);
    stream.chunk().unwrap();
    let mut waiting = body.clone();
    waiting["prompt"] = "Another".into();
    let waiting = server.post(PATH, &waiting);
    let slots = busy();
    assert_eq!(slots.len(), 2, "{slots:?}");
    for slot in &slots {
        assert_eq!(
            (&slot["params"]["top_k"], &slot["params"]["n_predict"]),
            (&json!(9), &json!(90))
        );
        let next = &slot["next_token"];
        let number = |name: &str| next[name].as_u64().unwrap();
        assert_eq!(number("n_decoded") + number("n_remain"), 90);
    }
    assert!(slots[0]["next_token"]["n_decoded"].as_u64().unwrap() > 0);
    assert_ne!(slots[0]["id_task"], slots[1]["id_task"]);
    for hidden in ["secret", "Another", "never said"] {
        assert!(!json!(slots).to_string().contains(hidden), "{slots:?}");
    }
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 503);
    drop(held);
    stream.text();
    waiting.text();
    assert_eq!(busy().len(), 0);
    assert_eq!(server.get("/slots?model=other").status, 404);
    assert_eq!(server.get("/slots?model=demo").status, 200);
}

#[test]
fn slots_need_a_key() {
    let config = ServerConfig {
        api_keys: vec!["one".into()],
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 2);
    assert_eq!(server.get("/slots").status, 401);
    let key = [("x-api-key", "one")];
    assert_eq!(server.send("GET", "/slots", &key, b"").status, 200);
}

#[test]
fn tokens_are_told_in_these_words_too() {
    let server = Running::demo();
    let text = "Hello there \u{1f98a}";
    let plain = server.ask("/tokenize", &json!({"content": text}));
    let same = json!({"prompt": text, "add_special_tokens": false});
    assert_eq!(plain["tokens"], server.ask("/tokenize", &same)["tokens"]);
    let pieces = server.ask("/tokenize", &json!({"content": text, "with_pieces": true}));
    let mut bytes = Vec::new();
    for (piece, id) in pieces["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .zip(plain["tokens"].as_array().unwrap())
    {
        assert_eq!(piece["id"], *id);
        match &piece["piece"] {
            Value::String(text) => bytes.extend(text.bytes()),
            list => bytes.extend(serde_json::from_value::<Vec<u8>>(list.clone()).unwrap()),
        }
    }
    assert_eq!(bytes, text.as_bytes());
    let back = server.ask("/detokenize", &json!({"tokens": plain["tokens"]}));
    assert_eq!(
        (&back["content"], &back["prompt"]),
        (&json!(text), &json!(text))
    );
    let both = json!({"content": "a", "prompt": "b"});
    assert_eq!(
        server.post("/tokenize", &both).json()["error"]["param"],
        "content"
    );
}

#[test]
fn prompts_are_cut_here_too() {
    let server = Running::demo();
    let body = json!({"prompt": (300..340).collect::<Vec<u32>>(), "n_predict": 1, "truncate_prompt_tokens": 7});
    assert_eq!(server.ask(PATH, &body)["tokens_evaluated"], 7);
}
