//! An engine that fails while it answers: all its requests fail, and health reports it at once.

use super::hooked::{Hooks, hooked};
use super::{Running, demo_model};
use ferrum_engine::EngineConfig;
use ferrum_engine::sampler::NoToken;
use ferrum_models::{Readback, StepBatch, StepOutput};
use ferrum_server::ServerConfig;
use ferrum_types::{Error, Result};
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

/// What comes after the last good step.
#[derive(Clone)]
pub(super) enum Then {
    Error,
    Panic,
    /// A step does not end while another thread holds this.
    Hang(Arc<Mutex<()>>),
}

/// Makes of a runner one that has this many good steps in it.
pub(super) struct Breaking {
    pub(super) good_steps: usize,
    pub(super) then: Then,
    /// Whether it computes nothing but NaN.
    pub(super) nan: bool,
    /// Gone with the runner; to be counted, not read.
    pub(super) _life: Arc<()>,
}

impl Hooks for Breaking {
    fn before(&mut self, _: &StepBatch) -> Result<()> {
        match self.good_steps.checked_sub(1) {
            Some(left) => self.good_steps = left,
            None => match &self.then {
                Then::Error => return Err(Error::invalid("step", "the device has gone")),
                Then::Panic => panic!("the device has gone"),
                Then::Hang(until) => drop(until.lock().unwrap()),
            },
        }
        Ok(())
    }

    fn after(&mut self, wanted: &[Readback], output: &mut StepOutput) {
        if self.nan {
            output.logits_mut().fill(f32::NAN);
            for row in 0..wanted.len() {
                output.set_token(row, Err(NoToken::NotANumber));
            }
        }
    }
}

#[test]
fn a_fault_fails_requests_clearly_and_turns_health_red() {
    for then in [Then::Error, Then::Panic] {
        let (model, text) = demo_model();
        let engine = (EngineConfig::default(), 4);
        let server = Running::with(model, text, ServerConfig::default(), engine, |inner| {
            hooked(
                inner,
                Breaking {
                    good_steps: 20,
                    then,
                    nan: false,
                    _life: Arc::default(),
                },
            )
        });
        assert_eq!(server.get("/health").status, 200);
        let endless = json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true});
        let mut stream = endless.clone();
        stream["stream"] = true.into();
        let stream = server.post(TEXT, &stream);
        assert_eq!(stream.status, 200);
        let whole = server.post(TEXT, &endless);
        assert_eq!(whole.status, 500);
        let error = whole.json();
        assert_eq!(error["error"]["type"], "server_error");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("the device has gone"), "{message}");
        let broken = Instant::now();
        let text = stream.text();
        let last = text.lines().rev().find(|line| line.starts_with("data: {"));
        assert!(
            last.is_some_and(|error| error.contains("the device has gone")),
            "{text}"
        );
        while server.get("/health").status != 503 {
            assert!(
                broken.elapsed() < Duration::from_secs(60),
                "health stays green"
            );
        }
        assert_eq!(server.get("/health").json()["model"], "demo");
        let ready = server.get("/ready");
        assert_eq!(ready.status, 503);
        assert!(
            ready
                .text()
                .contains("the engine of \\\"demo\\\" has failed")
        );
        assert_eq!(server.post(TEXT, &json!({"prompt": "a"})).status, 500);
        // The server itself goes on to say so.
        assert_eq!(server.get("/metrics").status, 200);
    }
}

/// A server whose engine hangs from its fifth step on, for as long as `until` is locked.
fn hanging(config: ServerConfig, until: &Arc<Mutex<()>>) -> Running {
    let (model, text) = demo_model();
    let engine = (EngineConfig::default(), 4);
    Running::with(model, text, config, engine, |inner| {
        hooked(
            inner,
            Breaking {
                good_steps: 4,
                then: Then::Hang(Arc::clone(until)),
                nan: false,
                _life: Arc::default(),
            },
        )
    })
}

#[test]
fn an_engine_that_hangs_holds_no_answer_beyond_its_deadline() {
    let until = Arc::new(Mutex::new(()));
    let hang = until.lock().unwrap();
    let config = ServerConfig {
        request_timeout: Duration::from_millis(500),
        ..ServerConfig::default()
    };
    let server = hanging(config, &until);
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true});
    let whole = server.post(TEXT, &body);
    assert_eq!(whole.status, 504);
    assert_eq!(whole.json()["error"]["code"], "timeout");
    body["stream"] = true.into();
    let text = server.post(TEXT, &body).text();
    assert!(text.contains("\"code\":\"timeout\""), "{text}");
    drop(hang);
}

#[test]
fn a_step_that_hangs_keeps_the_server_from_ending_for_a_while_only() {
    let until = Arc::new(Mutex::new(()));
    let hang = until.lock().unwrap();
    let config = ServerConfig {
        grace: Duration::from_millis(100),
        shutdown_timeout: Some(Duration::from_secs(7)),
        ..ServerConfig::default()
    };
    let mut server = hanging(config, &until);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 400, "stream": true});
    let mut stream = server.post(TEXT, &body);
    assert!(stream.chunk().is_some());
    server.stop();
    let error = server.outcome().unwrap_err();
    assert_eq!(error.models, ["demo"]);
    let said = error.to_string();
    assert!(said.contains("did not end within 7 s"), "{said}");
    drop(hang);
}

#[test]
fn nan_fails_requests_and_degrades_health_but_not_readiness() {
    let (model, text) = demo_model();
    let engine = (EngineConfig::default(), 4);
    let server = Running::with(model, text, ServerConfig::default(), engine, |inner| {
        hooked(
            inner,
            Breaking {
                good_steps: usize::MAX,
                then: Then::Error,
                nan: true,
                _life: Arc::default(),
            },
        )
    });
    for temperature in [0, 1, 0] {
        assert_eq!(server.get("/health").json()["status"], "ok");
        let request = json!({"prompt": "Once", "max_tokens": 4, "temperature": temperature});
        let failed = server.post(TEXT, &request);
        assert_eq!(failed.status, 500);
        let error = failed.json();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("NaN"), "{message}");
    }
    let health = server.get("/health");
    assert_eq!(health.status, 200);
    let expected = json!({"status": "degraded", "nan_failures": 3, "model": "demo"});
    assert_eq!(health.json(), expected);
    assert_eq!(server.get("/ready").status, 200);
    let metrics = server.get("/metrics").text();
    let line = metrics
        .lines()
        .find(|line| line.starts_with("ferrum:nan_failures_total{"));
    assert!(line.is_some_and(|line| line.ends_with(" 3")), "{line:?}");
}
