//! Responses as they come: events with a type and a number.

use super::shape::{Shape, item_id, part};
use crate::answers::Next;
use crate::error::ApiError;
use crate::speech::{Block, Blocks, Change, End, Kind, Speech};
use crate::sse::{Chunks, Events};
use serde_json::{Value, json};

/// See the [module](self).
pub(super) struct ResponseEvents {
    /// Gone when the response has ended.
    shape: Option<Shape>,
    speech: Speech,
    blocks: Blocks,
    /// Events so far.
    number: u64,
}

impl ResponseEvents {
    pub(super) fn new(shape: Shape, speech: Speech) -> Self {
        Self {
            shape: Some(shape),
            speech,
            blocks: Blocks::default(),
            number: 0,
        }
    }

    /// Numbers the events that were added after the first `before`.
    fn count(&mut self, out: &mut [Value], before: usize) {
        for event in &mut out[before..] {
            event["sequence_number"] = self.number.into();
            self.number += 1;
        }
    }
}

impl Chunks for ResponseEvents {
    const EVENTS: Events = Events::Named;

    fn begin(&mut self, out: &mut Vec<Value>) {
        let before = out.len();
        if let Some(shape) = &self.shape {
            let response = shape.begun();
            out.push(json!({"type": "response.created", "response": response}));
            out.push(json!({"type": "response.in_progress", "response": response}));
        }
        self.count(out, before);
    }

    fn chunks(&mut self, next: Next, out: &mut Vec<Value>) {
        let before = out.len();
        match next {
            Next::Piece(piece) => {
                let part = self.speech.part(piece);
                let status = match part.end {
                    Some(End::Length) => "incomplete",
                    _ => "completed",
                };
                if let Some(shape) = &self.shape {
                    let tell =
                        |at, block: &Block, change| tell(shape, (at, block), change, status, out);
                    self.blocks.add(part, tell);
                }
            }
            Next::Done(usage) => {
                if let Some(shape) = self.shape.take() {
                    let response = shape.ended(&self.blocks, &usage);
                    let kind = format!("response.{}", response["status"].as_str().unwrap_or(""));
                    out.push(json!({"type": kind, "response": response}));
                }
            }
            Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => {}
        }
        self.count(out, before);
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<Value>) {
        let before = out.len();
        if let Some(shape) = &self.shape {
            let response = shape.failed(&self.blocks, error);
            out.push(json!({"type": "response.failed", "response": response}));
        }
        self.count(out, before);
    }

    /// An event, as Codex ends a stream in which comments are all that comes for five minutes; a long prompt may take
    /// more. Of the known events, this one says nothing new at any time.
    fn keep_alive(&mut self) -> Option<Value> {
        let response = self.shape.as_ref()?.going_on(&self.blocks);
        let mut events = [json!({"type": "response.in_progress", "response": response})];
        self.count(&mut events, 0);
        let [event] = events;
        Some(event)
    }
}

/// The events of a change to a block; `status` is that of a block which ends.
fn tell(
    shape: &Shape,
    (at, block): (usize, &Block),
    change: Change,
    status: &str,
    out: &mut Vec<Value>,
) {
    let id = item_id(block);
    let whole_part = match &block.kind {
        Kind::Call(_) => None,
        _ => Some(part(block)),
    };
    // An event about the text of an item.
    let text = |end: &str, field: &str, text: &str| {
        let (kind, is_part) = match &block.kind {
            Kind::Reasoning => ("reasoning_text", true),
            Kind::Text => ("output_text", true),
            Kind::Call(_) => ("function_call_arguments", false),
        };
        let mut event = json!({
            "type": format!("response.{kind}.{end}"),
            "item_id": id,
            "output_index": at,
        });
        event[field] = text.into();
        if is_part {
            event["content_index"] = 0.into();
        }
        if block.kind == Kind::Text {
            event["logprobs"] = json!([]);
        }
        event
    };
    let part_event = |kind: &str, part: Value| {
        json!({
            "type": format!("response.content_part.{kind}"),
            "item_id": id,
            "output_index": at,
            "content_index": 0,
            "part": part,
        })
    };
    let item_event = |kind: &str, status: &str| {
        json!({
            "type": format!("response.output_item.{kind}"),
            "output_index": at,
            "item": shape.item(block, status),
        })
    };
    match change {
        Change::Begins => {
            out.push(item_event("added", "in_progress"));
            out.extend(whole_part.map(|part| part_event("added", part)));
        }
        Change::Grows(more) => out.push(text("delta", "delta", &more)),
        Change::Ends => {
            let field = match &block.kind {
                Kind::Call(_) => "arguments",
                _ => "text",
            };
            let mut done = text("done", field, &block.text);
            if let Kind::Call(name) = &block.kind {
                done["name"] = name.as_str().into();
            }
            out.push(done);
            out.extend(whole_part.map(|part| part_event("done", part)));
            out.push(item_event("done", status));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::App;
    use crate::config::ServerConfig;
    use crate::conversation::ChatPrompt;
    use crate::models::demo;
    use crate::output::Looks;
    use serde_json::Map;
    use std::sync::Arc;

    #[test]
    fn a_silent_stream_is_kept_alive_by_events_with_numbers() {
        let loader = Arc::new(|_: &str| Ok(demo()));
        let app = App::new(vec!["demo".into()], loader, ServerConfig::default(), None);
        let shape = Shape::new(&Arc::new(app), Map::new(), None);
        let prompt = ChatPrompt {
            tokens: vec![5],
            looks: Looks::default(),
        };
        let mut stream = ResponseEvents::new(shape, Speech::new(&prompt, 1));
        let mut events = Vec::new();
        stream.begin(&mut events);
        events.extend(
            [stream.keep_alive(), stream.keep_alive()]
                .into_iter()
                .flatten(),
        );
        let told = events.iter().map(|event| {
            (
                event["type"].as_str().unwrap_or_default(),
                event["sequence_number"].as_u64(),
            )
        });
        let in_progress = "response.in_progress";
        let expected = [
            ("response.created", Some(0)),
            (in_progress, Some(1)),
            (in_progress, Some(2)),
            (in_progress, Some(3)),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
        assert_eq!(events[1]["response"], events[3]["response"]);
    }
}
