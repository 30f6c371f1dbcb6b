//! Several models: loaded when they are asked for, unloaded when they are not, and never mixed up.

use super::faults::{Breaking, Then};
use super::hooked::hooked;
use super::traces::{attribute, collector, spans};
use super::{CONTEXT, PATIENCE, Running, demo_model, load};
use ferrum_engine::EngineConfig;
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::read_model;
use ferrum_server::{LoadedModel, ModelEvent, ModelLoader, ServerConfig};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Loads the demo model, or for "llama…" a random one with another tokenizer.
#[derive(Default)]
struct Zoo {
    state: Mutex<Keeping>,
    moved: Condvar,
    /// One more for each runner that lives.
    lives: Arc<()>,
}

#[derive(Default)]
struct Keeping {
    /// Why a model cannot be loaded now.
    faults: BTreeMap<String, String>,
    /// Steps after which a model breaks.
    good_steps: BTreeMap<String, usize>,
    /// Models whose loading waits.
    held: Vec<String>,
    events: Vec<String>,
    /// Most runners that were there when a load began.
    most: usize,
}

impl Zoo {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn change(&self, change: impl FnOnce(&mut Keeping)) {
        change(&mut self.state.lock().unwrap());
        self.moved.notify_all();
    }

    fn alive(&self) -> usize {
        Arc::strong_count(&self.lives) - 1
    }

    /// How often something was told.
    fn told(&self, event: &str) -> usize {
        let state = self.state.lock().unwrap();
        state.events.iter().filter(|told| *told == event).count()
    }
}

impl ModelLoader for Zoo {
    fn load(&self, name: &str) -> Result<LoadedModel, String> {
        let state = self.state.lock().unwrap();
        let held = |state: &mut Keeping| state.held.iter().any(|held| held == name);
        let mut state = self.moved.wait_while(state, held).unwrap();
        state.most = state.most.max(self.alive());
        if let Some(fault) = state.faults.get(name) {
            return Err(fault.clone());
        }
        let good_steps = state.good_steps.get(name).copied();
        drop(state);
        let (model, text) = match name.starts_with("llama") {
            true => {
                let folder = fixtures().join("models/llama3-tied");
                let model = read_model(ModelSource::open(&folder).unwrap()).unwrap();
                (model, (Tokenizer::from_hf_dir(&folder).unwrap(), None))
            }
            false => demo_model(),
        };
        let life = Arc::clone(&self.lives);
        Ok(load(model, text, (EngineConfig::default(), 4), |inner| {
            hooked(
                inner,
                Breaking {
                    good_steps: good_steps.unwrap_or(usize::MAX),
                    then: Then::Error,
                    nan: false,
                    _life: life,
                },
            )
        }))
    }

    fn on_event(&self, name: &str, event: ModelEvent<'_>) {
        let event = match event {
            ModelEvent::Loading => "loading",
            ModelEvent::Loaded(_) => "loaded",
            ModelEvent::Failed(_) => "failed",
            ModelEvent::Unloaded => "unloaded",
        };
        self.change(|state| state.events.push(format!("{name} {event}")));
    }
}

fn serve(zoo: &Arc<Zoo>, names: &[&str], preload: usize, config: ServerConfig) -> Running {
    Running::models(names, Arc::clone(zoo) as _, preload, config)
}

fn one_at_a_time() -> ServerConfig {
    ServerConfig {
        max_loaded_models: Some(1),
        ..ServerConfig::default()
    }
}

fn body(model: &str) -> Value {
    json!({"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0,
           "ignore_eos": true})
}

fn text(server: &Running, model: &str) -> String {
    let answer = server.ask(TEXT, &body(model));
    assert_eq!(answer["model"], model);
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn status(server: &Running, model: &str) -> Value {
    let found = server.get(&format!("/v1/models/{model}")).json();
    found["status"]["value"].clone()
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn figure(server: &Running, line: &str) -> Option<String> {
    let page = server.get("/metrics").text();
    let mut lines = page.lines().filter_map(|found| found.strip_prefix(line));
    let value = lines.next().map(|value| value.trim().to_owned());
    assert_eq!(lines.next(), None, "{line} is there twice");
    value
}

#[test]
fn models_have_further_names() {
    let zoo = Zoo::new();
    let config = ServerConfig {
        aliases: vec![("gpt-4o".into(), "llama".into())],
        any_model_name: true,
        ..ServerConfig::default()
    };
    let server = serve(&zoo, &["demo", "llama"], 2, config);
    assert_eq!(text(&server, "gpt-4o"), text(&server, "llama"));
    assert_eq!(text(&server, "claude-x"), text(&server, "demo"));
    let answer = server.ask(TEXT, &body("gpt-4o"));
    assert_eq!(answer["model"], "gpt-4o");
    let listed = server.get("/v1/models").json();
    let ids: Vec<_> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["id"].clone())
        .collect();
    assert_eq!(ids, ["demo", "llama", "gpt-4o"]);
    // Anthropic's clients read another shape.
    let headers = [("anthropic-version", "2023-06-01")];
    let listed = server.send("GET", "/v1/models", &headers, b"").json();
    assert_eq!(
        (&listed["first_id"], &listed["has_more"]),
        (&json!("demo"), &json!(false))
    );
    let one = server
        .send("GET", "/v1/models/gpt-4o", &headers, b"")
        .json();
    assert_eq!(
        (&one["type"], &one["id"]),
        (&json!("model"), &json!("gpt-4o"))
    );
    assert!(one["created_at"].as_str().unwrap().starts_with("20"));
}

#[test]
fn a_model_is_loaded_when_it_is_asked_for() {
    let zoo = Zoo::new();
    let server = serve(&zoo, &["demo", "llama"], 1, ServerConfig::default());
    let listed = server.get("/v1/models").json();
    let shown = |i: usize| {
        let model = &listed["data"][i];
        (
            &model["id"],
            &model["status"]["value"],
            &model["max_model_len"],
        )
    };
    let (loaded, unloaded) = (json!("loaded"), json!("unloaded"));
    assert_eq!(shown(0), (&json!("demo"), &loaded, &json!(CONTEXT)));
    assert_eq!(shown(1), (&json!("llama"), &unloaded, &Value::Null));
    assert_eq!(listed["data"][1]["ferrum"]["defaults"], Value::Null);
    let ids = |model: Value| {
        let asked = json!({"model": model, "prompt": "Once upon a time"});
        server.ask("/tokenize", &asked)["tokens"].clone()
    };
    assert_eq!(ids(json!("demo")), ids(Value::Null));
    assert_eq!((zoo.alive(), zoo.told("llama loading")), (1, 0));
    assert_ne!(ids(json!("llama")), ids(json!("demo")));
    assert_eq!((zoo.alive(), zoo.told("llama loaded")), (2, 1));
    assert_eq!(status(&server, "llama"), "loaded");
    assert_ne!(text(&server, "llama"), text(&server, "demo"));

    for reply in [
        server.post(TEXT, &body("mouse")),
        server.get("/v1/models/mouse"),
    ] {
        assert_eq!(reply.status, 404);
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "model_not_found");
        let words = "there is no model \"mouse\" here, only demo, llama";
        assert_eq!(error["message"], words);
    }
    let wrong = server.post(TEXT, &json!({"model": 5, "prompt": "a"}));
    assert_eq!(
        wrong.json()["error"]["message"],
        "model: invalid type: integer `5`, expected a string"
    );
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for model in ["demo", "llama"] {
        let line = format!("vllm:generation_tokens_total{{model_name=\"{model}\"}} ");
        eventually(&line, || figure(&server, &line).as_deref() == Some("12"));
    }
}

#[test]
fn one_load_serves_all_who_wait_and_disturbs_nobody_else() {
    let zoo = Zoo::new();
    zoo.change(|state| state.held.push("llama".into()));
    let server = serve(&zoo, &["demo", "llama"], 1, ServerConfig::default());
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| text(&server, "llama")))
            .collect();
        eventually("it loads", || status(&server, "llama") == "loading");
        text(&server, "demo");
        assert_eq!(server.get("/health").status, 200);
        assert_eq!(server.get("/ready").status, 200);
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        zoo.change(|state| state.held.clear());
        let answers: Vec<_> = waiting.into_iter().map(|w| w.join().unwrap()).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]));
    });
    assert_eq!(zoo.told("llama loading"), 1);
}

#[test]
fn who_waits_too_long_or_with_too_many_is_told() {
    let zoo = Zoo::new();
    zoo.change(|state| state.held.push("llama".into()));
    let config = ServerConfig {
        max_waiting: 1,
        request_timeout: Duration::from_secs(2),
        ..ServerConfig::default()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.post(TEXT, &body("llama")));
        eventually("it loads", || status(&server, "llama") == "loading");
        let refused = server.post(TEXT, &body("llama"));
        assert_eq!(
            (refused.status, refused.header("retry-after")),
            (429, Some("1"))
        );
        assert_eq!(refused.json()["error"]["code"], "overloaded");
        let late = waiting.join().unwrap();
        assert_eq!(late.status, 504);
        assert_eq!(late.json()["error"]["code"], "timeout");
    });
    // What was begun is not in vain.
    zoo.change(|state| state.held.clear());
    eventually("it is loaded", || status(&server, "llama") == "loaded");
}

#[test]
fn what_nobody_uses_is_unloaded_and_comes_back_the_same() {
    let zoo = Zoo::new();
    let config = ServerConfig {
        idle_unload: Some(Duration::from_millis(100)),
        ..ServerConfig::default()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    let say = |more: Value| {
        let mut asked = json!({"input": "What is 7 plus 5?", "temperature": 0});
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        server.ask("/v1/responses", &asked)
    };
    let before = say(json!({"model": "demo"}));
    eventually("nothing is loaded", || {
        zoo.alive() == 0 && zoo.told("demo unloaded") == 1
    });
    assert_eq!(status(&server, "demo"), "unloaded");
    // What is known stays known, and what was counted is still counted.
    assert_eq!(
        server.get("/v1/models/demo").json()["max_model_len"],
        CONTEXT
    );
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    assert_eq!(server.get("/ready").status, 200);
    let counted = "vllm:generation_tokens_total{model_name=\"demo\"} ";
    let tokens = figure(&server, counted).unwrap();
    assert_eq!(tokens, before["usage"]["output_tokens"].to_string());
    assert_eq!(
        figure(&server, "ferrum:model_loaded{model_name=\"demo\"} ").as_deref(),
        Some("0")
    );
    let again = say(json!({}));
    assert_eq!(
        again["output"][0]["content"],
        before["output"][0]["content"]
    );
    assert_eq!(zoo.told("demo loaded"), 2);
    // A conversation goes on where it was.
    eventually("it is gone again", || zoo.told("demo unloaded") == 2);
    let on = say(json!({"previous_response_id": before["id"]}));
    assert_eq!(on["model"], "demo");
    let sum = ["usage", "input_tokens"]
        .iter()
        .fold(&on, |value, key| &value[key]);
    assert!(
        sum.as_u64() > before["usage"]["input_tokens"].as_u64(),
        "{on}"
    );
}

#[test]
fn a_response_is_gone_on_from_with_its_model() {
    let zoo = Zoo::new();
    let server = serve(&zoo, &["demo", "twin"], 1, ServerConfig::default());
    let first = server.ask("/v1/responses", &json!({"model": "twin", "input": "Hello"}));
    let next = json!({"input": "Hello", "previous_response_id": first["id"]});
    assert_eq!(server.ask("/v1/responses", &next)["model"], "twin");
    let other = json!({"model": "demo", "input": "Hello", "previous_response_id": first["id"]});
    assert_eq!(server.ask("/v1/responses", &other)["model"], "demo");
}

#[test]
fn one_place_is_shared_under_load_and_no_answer_is_mixed_up() {
    let zoo = Zoo::new();
    let config = ServerConfig {
        model_min_residency: Duration::from_millis(50),
        ..one_at_a_time()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    let expected: BTreeMap<_, _> = ["demo", "llama"]
        .map(|name| (name, text(&server, name)))
        .into();
    assert_ne!(expected["demo"], expected["llama"]);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                let name = ["demo", "llama"][worker % 2];
                for _ in 0..10 {
                    assert_eq!(text(server, name), expected[name]);
                }
            });
        }
    });
    assert_eq!(
        zoo.state.lock().unwrap().most,
        0,
        "two models were loaded at once"
    );
    assert!(zoo.told("demo loaded") >= 2 && zoo.told("demo failed") == 0);
}

#[test]
fn an_answer_in_flight_is_not_cut_off_for_another_model() {
    let zoo = Zoo::new();
    let config = ServerConfig {
        model_min_residency: Duration::ZERO,
        ..one_at_a_time()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    let endless = json!({"prompt": "Once upon a time", "max_tokens": CONTEXT, "n": 16,
                         "ignore_eos": true, "stream": true});
    std::thread::scope(|scope| {
        let mut stream = server.post(TEXT, &endless);
        assert!(stream.chunk().is_some());
        let other = scope.spawn(|| text(&server, "llama"));
        // Its minimum residency is over, so it accepts no new request before the other model is served.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(
            zoo.told("llama loading"),
            0,
            "it was too fast for this test"
        );
        let late = scope.spawn(|| text(&server, "demo"));
        let text = stream.text();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(text.matches("\"finish_reason\":\"length\"").count(), 16);
        other.join().unwrap();
        late.join().unwrap();
    });
    let events = zoo.state.lock().unwrap().events.clone();
    let models: Vec<_> = events
        .iter()
        .filter(|event| event.ends_with(" loaded"))
        .collect();
    assert_eq!(models, ["demo loaded", "llama loaded", "demo loaded"]);
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_the_others_alone() {
    let zoo = Zoo::new();
    let fault = "no such file\nhint: look elsewhere".to_owned();
    zoo.change(|state| {
        state.faults.insert("llama".into(), fault);
    });
    let server = serve(&zoo, &["demo", "llama"], 1, one_at_a_time());
    for _ in 0..2 {
        let reply = server.post(TEXT, &body("llama"));
        assert_eq!(reply.status, 503);
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "model_not_loaded");
        let words = "the model \"llama\" could not be loaded: no such file";
        assert_eq!(error["message"], words);
    }
    // Each request has tried, and the place of the other was asked for in vain once only: it was idle.
    assert_eq!(zoo.told("llama failed"), 2);
    let shown = server.get("/v1/models/llama").json();
    assert_eq!(shown["status"]["value"], "failed");
    assert!(
        shown["status"]["reason"]
            .as_str()
            .unwrap()
            .starts_with("no such file")
    );
    text(&server, "demo");
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let failures = "ferrum:model_load_failures_total{model_name=\"llama\"} ";
    assert_eq!(figure(&server, failures).as_deref(), Some("2"));
    let message = json!({"model": "llama", "max_tokens": 5,
                         "messages": [{"role": "user", "content": "a"}]});
    let reply = server.post("/v1/messages", &message);
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["error"]["type"], "overloaded_error");
    zoo.change(|state| state.faults.clear());
    text(&server, "llama");
    assert_eq!(status(&server, "llama"), "loaded");
}

#[test]
fn an_engine_that_breaks_is_shown_and_takes_nobody_s_place() {
    let zoo = Zoo::new();
    zoo.change(|state| {
        state.good_steps.insert("demo".into(), 3);
    });
    let server = serve(&zoo, &["demo", "llama"], 1, one_at_a_time());
    assert_eq!(server.post(TEXT, &body("demo")).status, 500);
    eventually("health is red", || server.get("/health").status == 503);
    // It is not hidden by a load of another engine.
    text(&server, "llama");
    let health = server.get("/health");
    assert_eq!(health.status, 503);
    assert_eq!(health.json(), json!({"status": "failed", "model": "demo"}));
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.post(TEXT, &body("demo")).status, 500);
    assert_eq!(status(&server, "demo"), "failed");
    assert_eq!(zoo.told("demo loading"), 1);
    text(&server, "llama");
}

#[test]
fn adapters_stay_with_their_model_when_it_goes() {
    let zoo = Zoo::new();
    let config = ServerConfig {
        lora_dir: Some(fixtures().join("lora")),
        ..one_at_a_time()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    let load = "/v1/load_lora_adapter";
    let adapter = |name: &str, base: &str| json!({"lora_name": name, "lora_path": "llama-all", "base_model_name": base});
    let reply = server.post(load, &adapter("one", "mouse"));
    assert_eq!(reply.status, 404);
    let error = &reply.json()["error"];
    assert_eq!(error["param"], "base_model_name");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("only demo, llama")
    );
    // Names are those of all models.
    assert_eq!(server.post(load, &adapter("demo", "llama")).status, 400);
    let reply = server.post(load, &json!({"lora_name": "one", "lora_path": "llama-all"}));
    assert!(reply.text().contains("for another model"));
    assert_eq!(server.post(load, &adapter("one", "llama")).status, 200);
    let listed = server.get("/v1/models").json();
    let ids: Vec<_> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(ids, ["demo", "llama", "one"]);
    assert_eq!(listed["data"][2]["parent"], "llama");

    let (plain, adapted) = (text(&server, "llama"), text(&server, "one"));
    assert_ne!(plain, adapted);
    text(&server, "demo");
    assert_eq!(status(&server, "one"), "unloaded");
    assert_eq!(text(&server, "one"), adapted);
    assert_eq!(text(&server, "llama"), plain);
    text(&server, "demo");
    let unload = json!({"lora_name": "one"});
    assert_eq!(server.post("/v1/unload_lora_adapter", &unload).status, 200);
    assert_eq!(server.post(TEXT, &body("one")).status, 404);
}

#[test]
fn the_end_does_not_wait_for_a_load() {
    let zoo = Zoo::new();
    zoo.change(|state| state.held.push("llama".into()));
    let mut server = serve(&zoo, &["demo", "llama"], 1, ServerConfig::default());
    let stop = server.stop.take().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.post(TEXT, &body("llama")).status);
        eventually("it loads", || status(&server, "llama") == "loading");
        stop.send(()).unwrap();
        assert_eq!(waiting.join().unwrap(), 503);
    });
    server.wait();
    eventually("what was loaded is gone", || zoo.alive() == 0);
    // What is loaded too late is not kept.
    zoo.change(|state| state.held.clear());
    eventually("it was loaded", || zoo.told("llama loaded") == 1);
    eventually("it is gone", || zoo.alive() == 0);
}

#[test]
fn traces_name_the_model_that_was_asked_for() {
    let (url, told) = collector();
    let zoo = Zoo::new();
    let config = ServerConfig {
        otlp: Some(url.parse().unwrap()),
        ..ServerConfig::default()
    };
    let server = serve(&zoo, &["demo", "llama"], 1, config);
    text(&server, "llama");
    let spans = spans(server, &told);
    let request = spans.iter().find(|span| span["kind"] == 2).unwrap();
    let name = attribute(request, "gen_ai.request.model");
    assert_eq!(*name, json!({"stringValue": "llama"}));
    assert!(
        spans.iter().any(|span| span["name"] == "load"),
        "{spans:#?}"
    );
}
