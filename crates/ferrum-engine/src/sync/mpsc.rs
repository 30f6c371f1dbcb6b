//! The channel of `std` for `shuttle`, whose own keeps messages that nobody can receive any more. The engine needs them
//! dropped: with a request that was not read goes its stream, which ends by that.

use shuttle::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub(crate) use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError};

struct State<T> {
    messages: VecDeque<T>,
    senders: usize,
    has_receiver: bool,
}

struct Channel<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Channel<T> {
    fn with<R>(&self, use_it: impl FnOnce(&mut State<T>) -> R) -> R {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = use_it(&mut state);
        drop(state);
        self.changed.notify_all();
        result
    }
}

pub(crate) struct Sender<T>(Arc<Channel<T>>);

pub(crate) struct Receiver<T>(Arc<Channel<T>>);

pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = State {
        messages: VecDeque::new(),
        senders: 1,
        has_receiver: true,
    };
    let channel = Arc::new(Channel {
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    (Sender(Arc::clone(&channel)), Receiver(channel))
}

impl<T> Sender<T> {
    pub(crate) fn send(&self, message: T) -> Result<(), SendError<T>> {
        self.0.with(|state| {
            if !state.has_receiver {
                return Err(SendError(message));
            }
            state.messages.push_back(message);
            Ok(())
        })
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.with(|state| state.senders += 1);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.with(|state| state.senders -= 1);
    }
}

impl<T> Receiver<T> {
    pub(crate) fn try_recv(&self) -> Result<T, TryRecvError> {
        self.0.with(|state| match state.messages.pop_front() {
            Some(message) => Ok(message),
            None if state.senders == 0 => Err(TryRecvError::Disconnected),
            None => Err(TryRecvError::Empty),
        })
    }

    pub(crate) fn recv(&self) -> Result<T, RecvError> {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut State<T>| state.messages.is_empty() && state.senders > 0;
        let waited = self.0.changed.wait_while(state, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.messages.pop_front().ok_or(RecvError)
    }

    /// There is no time: it waits for as long as it takes.
    pub(crate) fn recv_timeout(&self, _: Duration) -> Result<T, RecvTimeoutError> {
        self.recv().map_err(|_| RecvTimeoutError::Disconnected)
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let unread = self.0.with(|state| {
            state.has_receiver = false;
            std::mem::take(&mut state.messages)
        });
        // Messages have senders in them, which lock the channel when they go.
        drop(unread);
    }
}
