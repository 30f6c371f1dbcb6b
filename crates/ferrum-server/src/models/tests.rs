use super::residency::{Action, IdleExpiry, LoadWaiter, Residency, Resident};
use super::*;
use crate::config::ServerConfig;
use crate::models::model::ServedModel;
use ferrum_engine::{BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, KvDtype};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{RunnerConfig, read_model};

static DEMO: &[u8] = include_bytes!("../../../../assets/demo/ferrum-demo.gguf");

/// The demo model with a small context, under a template that knows all that requests may ask of one.
pub(crate) fn demo() -> LoadedModel {
    let gguf = || Gguf::from_static(DEMO).unwrap();
    let model = read_model(ModelSource::Gguf(gguf())).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf()).unwrap());
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap();
    let sizes = RunnerConfig::single(64);
    let session = device.load(&model, sizes, KvDtype::F32, &mut |_, _| ());
    let runner = session.unwrap().into_runner();
    let engine = EngineConfig::default();
    let engine = Engine::start(runner, Some(Arc::clone(&tokenizer)), engine).unwrap();
    let template = "{# <tool_call> <think> enable_thinking reasoning_effort #}a";
    let no_specials: [(&str, &str); 0] = [];
    let model = ServedModel {
        open_schemas: false,
        engine: engine.handle(),
        template: Some(ChatTemplate::from_source(template, no_specials).unwrap()),
        call_format: None,
        context: 64,
        vision: None,
        vocab_size: model.spec.vocab_size,
        generates: true,
        stop_tokens: Vec::new(),
        pooling: Some(Default::default()),
        dense: Default::default(),
        prompts: Default::default(),
        embedding_size: model.spec.hidden_size,
        sampling: ferrum_engine::SamplingParams::default(),
        tokenizer,
    };
    LoadedModel::Decoder(engine, Box::new(model))
}

// ---- Decisions

/// A resident, and whether it has failed.
#[derive(Debug)]
struct Thing(bool);

impl Resident for Thing {
    fn has_failed(&self) -> bool {
        self.0
    }
}

const MIN_RESIDENCY: Duration = Duration::from_secs(10);

/// Residency with a clock that the test moves.
struct World {
    residency: Residency<Thing>,
    now: Instant,
}

impl World {
    fn new(count: usize, capacity: usize) -> Self {
        let now = Instant::now();
        let residency = Residency::new(count, capacity, MIN_RESIDENCY, now);
        Self { residency, now }
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }

    fn poll(&mut self, index: usize, waiter: &mut LoadWaiter) -> Action {
        self.residency.poll(index, waiter, self.now)
    }

    /// Enqueues a request and polls it once.
    fn enqueue(&mut self, index: usize) -> (LoadWaiter, Action) {
        let mut waiter = self.residency.enqueue(index);
        let action = self.poll(index, &mut waiter);
        (waiter, action)
    }

    fn loaded(&mut self, index: usize, outcome: Result<Thing, &str>) {
        let outcome = outcome.map_err(str::to_owned);
        self.residency.loaded(index, outcome, self.now);
    }

    /// Has a model loaded, and held once.
    fn load(&mut self, index: usize) {
        let (mut waiter, action) = self.enqueue(index);
        assert_eq!(action, Action::Load);
        self.loaded(index, Ok(Thing(false)));
        assert_eq!(self.poll(index, &mut waiter), Action::Take);
    }

    fn release(&mut self, index: usize) {
        assert!(self.residency.release(index, self.now));
    }

    fn unload(&mut self, index: usize) {
        assert!(self.residency.unload(index).is_some());
        self.residency.unloaded(index);
    }
}

#[test]
fn a_load_is_shared_and_its_failure_told_to_those_who_waited() {
    let mut world = World::new(1, 1);
    let (mut first, action) = world.enqueue(0);
    assert_eq!(action, Action::Load);
    let (mut second, action) = world.enqueue(0);
    assert_eq!(action, Action::Wait);
    world.loaded(0, Err("no"));
    for waiter in [&mut first, &mut second] {
        assert_eq!(world.poll(0, waiter), Action::Failed("no".into()));
        let now = world.now;
        world.residency.cancel(0, waiter, now);
    }
    // Who comes later tries again, and nothing is left of the others.
    world.load(0);
    assert_eq!(world.residency.waiting(0), 0);
    world.release(0);
    assert_eq!(
        world.residency.idle_expiry(MIN_RESIDENCY, world.now),
        IdleExpiry::In(MIN_RESIDENCY)
    );
}

#[test]
fn who_goes_while_it_is_loaded_holds_nothing() {
    let mut world = World::new(1, 1);
    let (waiter, action) = world.enqueue(0);
    assert_eq!(action, Action::Load);
    let now = world.now;
    world.residency.cancel(0, &waiter, now);
    world.loaded(0, Ok(Thing(false)));
    world.pass(5);
    let left = MIN_RESIDENCY - Duration::from_secs(5);
    assert_eq!(
        world.residency.idle_expiry(MIN_RESIDENCY, world.now),
        IdleExpiry::In(left)
    );
    world.pass(5);
    assert_eq!(
        world.residency.idle_expiry(MIN_RESIDENCY, world.now),
        IdleExpiry::Expired(0)
    );
}

#[test]
fn the_idle_one_that_was_used_least_recently_goes() {
    let mut world = World::new(4, 2);
    for index in [0, 1] {
        world.load(index);
        world.pass(1);
        world.release(index);
    }
    let (mut waiter, action) = world.enqueue(2);
    assert_eq!(action, Action::Unload(0));
    assert!(world.residency.unload(0).is_some());
    // All that wait for the same model need one load, and another model has the next capacity.
    assert_eq!(world.poll(2, &mut waiter), Action::Wait);
    assert_eq!(world.enqueue(2).1, Action::Wait);
    let (mut third, action) = world.enqueue(3);
    assert_eq!(action, Action::Unload(1));
    assert!(world.residency.unload(1).is_some());
    world.residency.unloaded(1);
    // The first in the queue is the first to go.
    assert_eq!(world.poll(3, &mut third), Action::Wait);
    assert_eq!(world.poll(2, &mut waiter), Action::Load);
    world.residency.unloaded(0);
    assert_eq!(world.poll(3, &mut third), Action::Load);
}

#[test]
fn what_is_held_stays_and_its_place_comes_when_it_is_not() {
    let mut world = World::new(2, 1);
    world.load(0);
    let (mut waiter, action) = world.enqueue(1);
    assert_eq!(action, Action::Wait);
    world.residency.hold(0);
    assert!(!world.residency.release(0, world.now));
    assert_eq!(world.poll(1, &mut waiter), Action::Wait);
    world.release(0);
    assert_eq!(world.poll(1, &mut waiter), Action::Unload(0));
    world.unload(0);
    assert_eq!(world.poll(1, &mut waiter), Action::Load);
}

#[test]
fn a_model_that_is_never_idle_ends_its_turn() {
    let mut world = World::new(2, 1);
    world.load(0);
    let (mut waiter, action) = world.enqueue(1);
    assert_eq!(action, Action::Wait);
    world.pass(9);
    // Within the minimum residency, new requests are accepted.
    assert_eq!(world.enqueue(0).1, Action::Take);
    world.pass(1);
    let (mut late, action) = world.enqueue(0);
    assert_eq!(action, Action::Wait);
    assert!(!world.residency.release(0, world.now));
    world.release(0);
    assert_eq!(world.poll(0, &mut late), Action::Wait);
    assert_eq!(world.poll(1, &mut waiter), Action::Unload(0));
    world.unload(0);
    assert_eq!(world.poll(1, &mut waiter), Action::Load);
    // A load may take long; who waited for it is served before the other has its turn again.
    assert_eq!(world.poll(0, &mut late), Action::Wait);
    world.pass(60);
    world.loaded(1, Ok(Thing(false)));
    assert_eq!(world.poll(0, &mut late), Action::Wait);
    assert_eq!(world.poll(1, &mut waiter), Action::Take);
    assert_eq!(world.enqueue(1).1, Action::Take);
    world.pass(10);
    assert_eq!(world.enqueue(1).1, Action::Wait);
}

#[test]
fn a_turn_does_not_end_for_somebody_who_has_gone() {
    let mut world = World::new(2, 1);
    world.load(0);
    let (waiter, _) = world.enqueue(1);
    world.pass(20);
    assert_eq!(world.enqueue(0).1, Action::Wait);
    let now = world.now;
    world.residency.cancel(1, &waiter, now);
    assert_eq!(world.enqueue(0).1, Action::Take);
}

#[test]
fn what_broke_takes_no_place_and_stays() {
    let mut world = World::new(2, 1);
    let (mut waiter, _) = world.enqueue(0);
    world.loaded(0, Ok(Thing(true)));
    assert_eq!(world.poll(0, &mut waiter), Action::Take);
    world.release(0);
    world.load(1);
    world.pass(100);
    assert_eq!(
        world.residency.idle_expiry(MIN_RESIDENCY, world.now),
        IdleExpiry::Never
    );
    assert_eq!(world.enqueue(0).1, Action::Take);
}

// ---- Doing it

fn models(names: &[&str], config: ServerConfig) -> Arc<Models> {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    Models::new(names, Arc::new(|_: &str| Ok(demo())), &config)
}

fn one_at_a_time(request_timeout: Duration) -> ServerConfig {
    ServerConfig {
        max_loaded_models: Some(1),
        request_timeout,
        ..ServerConfig::default()
    }
}

#[tokio::test]
async fn a_lease_keeps_its_model_and_its_end_frees_it() {
    let models = models(&["a", "b"], one_at_a_time(Duration::from_secs(120)));
    let lease = models.lease(None).await.unwrap();
    let engine = lease.served.engine.clone();
    let again = lease.clone();
    let waiting = tokio::spawn({
        let models = Arc::clone(&models);
        async move { models.lease(Some("b")).await }
    });
    drop(lease);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished() && engine.health().is_alive());
    drop(again);
    let other = waiting.await.unwrap().unwrap();
    assert_eq!(other.requested.name, "b");
    assert_eq!(engine.health(), Health::Stopped);
    let status: Vec<_> = models.list().map(|(_, status)| status).collect();
    assert_eq!(status, [Status::Unloaded, Status::Loaded]);
}

#[tokio::test]
async fn who_gets_no_place_in_time_is_told_when_to_come_back() {
    let models = models(&["a", "b"], one_at_a_time(Duration::from_millis(300)));
    models.preload("a").await.unwrap();
    let _lease = models.lease(None).await.unwrap();
    let error = models.lease(Some("b")).await.unwrap_err();
    assert_eq!(error.code(), Some("models_busy"));
    let response = axum::response::IntoResponse::into_response(error);
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    // It waits no more.
    assert!(models.lease(None).await.is_ok());
}

#[tokio::test]
async fn a_loader_that_panics_harms_nobody() {
    let loader = |name: &str| match name {
        "a" => Ok(demo()),
        _ => panic!("it is not made for this"),
    };
    let names = vec!["a".into(), "b".into()];
    let models = Models::new(names, Arc::new(loader), &ServerConfig::default());
    for _ in 0..2 {
        let error = models.lease(Some("b")).await.unwrap_err();
        assert_eq!(error.code(), Some("model_not_loaded"));
        assert!(error.to_string().contains("\"b\""), "{error}");
    }
    assert!(models.lease(Some("a")).await.is_ok());
    assert_eq!(
        models.preload("b").await.unwrap_err(),
        "loading it panicked"
    );
}
