//! What formats have in common: reading what follows a marker, step by step, and calls that are JSON objects.

use super::deltas::Deltas;
use super::json::{self, Ended, ObjectScan};
use super::pending_text::PendingText;
use std::fmt::Debug;

/// Reads the calls that a marker begins, in the form of one format.
pub(super) trait CallReader: Debug + Send {
    /// Takes a step with what is held. At the end nothing more will come.
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step;
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// There may be another at once.
    Again,
    /// More has to come. At the end: what was taken and is not certain is text.
    Wait,
    /// The calls are over, and what is held is text.
    Over,
    /// What was taken since the last call is text, and so is what is held.
    NotACall,
}

/// A call that is an object with a name and arguments, in either order. Arguments are given as they come
/// where the name stands first, else when the call is complete.
#[derive(Debug)]
pub(super) struct ObjectCall {
    state: ObjectState,
    /// Only arguments tell it from an answer in JSON.
    bare: bool,
}

#[derive(Debug)]
enum ObjectState {
    /// Before the arguments: the scan of the whole, what it gave, and how much of what is held it has seen.
    Whole(ObjectScan, String, usize),
    Arguments,
    /// Members after the arguments, which no one needs.
    Tail(ObjectScan),
}

/// What a step in an object came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectStep {
    Again,
    Wait,
    /// It was a call, and is over.
    Over(Ended),
    NotACall,
}

impl ObjectCall {
    pub(super) fn new(bare: bool) -> Self {
        Self {
            state: ObjectState::Whole(ObjectScan::default(), String::new(), 0),
            bare,
        }
    }

    pub(super) fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> ObjectStep {
        match &mut self.state {
            ObjectState::Whole(scan, text, seen) => {
                if let Some((name, at)) = json::header(held.text()) {
                    held.commit(at);
                    deltas.begin_call(name);
                    self.state = ObjectState::Arguments;
                    return ObjectStep::Again;
                }
                let scanned = scan.feed(&held.text()[*seen..]);
                *text += &scanned.text;
                *seen += scanned.used;
                match scanned.ended {
                    None => return ObjectStep::Wait,
                    Some(Ended::Broken) => return ObjectStep::NotACall,
                    Some(Ended::Whole) => {}
                }
                let call = json::whole_call(text);
                let call = call.filter(|(_, arguments)| arguments.is_some() || !self.bare);
                let Some((name, arguments)) = call else {
                    return ObjectStep::NotACall;
                };
                held.commit(*seen);
                deltas.begin_call(name);
                deltas.arguments(arguments.as_deref().unwrap_or(json::NO_ARGUMENTS));
                ObjectStep::Over(Ended::Whole)
            }
            ObjectState::Arguments => match deltas.take_arguments(held) {
                None => ObjectStep::Wait,
                Some(Ended::Broken) => ObjectStep::Over(Ended::Broken),
                Some(Ended::Whole) => {
                    self.state = ObjectState::Tail(ObjectScan::after_member());
                    ObjectStep::Again
                }
            },
            ObjectState::Tail(scan) => {
                let scanned = scan.feed(held.text());
                held.commit(scanned.used);
                match scanned.ended {
                    None => ObjectStep::Wait,
                    Some(ended) => ObjectStep::Over(ended),
                }
            }
        }
    }
}

/// Calls that are objects after a marker, by themselves or in an array, with a marker behind them or none.
#[derive(Debug)]
pub(super) struct ObjectsReader {
    close: Option<&'static str>,
    state: ObjectsState,
}

#[derive(Debug)]
enum ObjectsState {
    Open,
    /// After the bracket or a comma.
    Item,
    /// In an object, which is an array's or not.
    Object(ObjectCall, bool),
    Between,
    Close,
}

impl ObjectsReader {
    pub(super) fn new(close: Option<&'static str>) -> Self {
        Self {
            close,
            state: ObjectsState::Open,
        }
    }
}

impl CallReader for ObjectsReader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        let object = |listed| ObjectsState::Object(ObjectCall::new(false), listed);
        self.state = match &mut self.state {
            ObjectsState::Object(call, listed) => match call.read(held, deltas) {
                ObjectStep::Again => return Step::Again,
                ObjectStep::Wait => return Step::Wait,
                ObjectStep::NotACall => return Step::NotACall,
                ObjectStep::Over(Ended::Whole) if *listed => ObjectsState::Between,
                ObjectStep::Over(_) => ObjectsState::Close,
            },
            ObjectsState::Close => {
                return match self.close.map(|marker| held.skip_marker(marker, end)) {
                    Some(None) => Step::Wait,
                    _ => Step::Over,
                };
            }
            _ if !held.skip_space() => return Step::Wait,
            state => match (state, held.text().as_bytes()[0]) {
                (ObjectsState::Open, b'[') => {
                    held.consume(1);
                    ObjectsState::Item
                }
                (ObjectsState::Open, b'{') => object(false),
                (ObjectsState::Item, b'{') => object(true),
                (ObjectsState::Between, b',') => {
                    held.consume(1);
                    ObjectsState::Item
                }
                (ObjectsState::Between, b']') => {
                    held.commit(1);
                    ObjectsState::Close
                }
                _ => return Step::NotACall,
            },
        };
        Step::Again
    }
}
