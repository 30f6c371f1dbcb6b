//! Responses as they come: events with a type and a number.

use super::shape::{Shape, item_id};
use crate::error::ApiError;
use crate::generation::chat_output::{
    Block, BlockEvent, BlockKind, Blocks, ChatFinish, ChatOutput,
};
use crate::generation::generation_stream::GenerationEvent;
use crate::http::sse::{EventText, StreamEncoder};
use crate::response::{ResponseChange, ResponseEvent, ResponseStatus};

/// See the [module](self).
pub(super) struct ResponseEvents {
    shape: Shape,
    output: ChatOutput,
    blocks: Blocks,
    /// Events so far.
    number: u64,
}

impl ResponseEvents {
    pub(super) fn new(shape: Shape, output: ChatOutput) -> Self {
        Self {
            shape,
            output,
            blocks: Blocks::default(),
            number: 0,
        }
    }
}

/// Writes events with their numbers.
struct Emitter<'a> {
    number: &'a mut u64,
    out: &'a mut EventText,
}

impl Emitter<'_> {
    fn emit(&mut self, change: ResponseChange<'_>) {
        self.out.named(&ResponseEvent {
            change,
            sequence_number: *self.number,
        });
        *self.number += 1;
    }

    /// The events of a change to a block; `status` is that of a block which ends.
    fn change(
        &mut self,
        shape: &Shape,
        (output_index, block): (usize, &Block),
        change: &BlockEvent,
        status: ResponseStatus,
    ) {
        let item_id = &*item_id(block);
        let content_index = 0;
        let is_call = matches!(block.kind, BlockKind::Call(_));
        match change {
            BlockEvent::Start => {
                let item = shape.item(block, ResponseStatus::InProgress);
                self.emit(ResponseChange::ItemAdded { output_index, item });
                if !is_call {
                    self.emit(ResponseChange::PartAdded {
                        item_id,
                        output_index,
                        content_index,
                        part: shape.part(block),
                    });
                }
            }
            BlockEvent::Delta(delta, logprobs) => self.emit(match &block.kind {
                BlockKind::Text => ResponseChange::TextDelta {
                    item_id,
                    output_index,
                    content_index,
                    delta,
                    logprobs: shape.listed(logprobs),
                },
                BlockKind::Reasoning => ResponseChange::ReasoningDelta {
                    item_id,
                    output_index,
                    content_index,
                    delta,
                },
                BlockKind::Call(_) => ResponseChange::ArgumentsDelta {
                    item_id,
                    output_index,
                    delta,
                },
            }),
            BlockEvent::Stop => {
                let text = &block.text;
                self.emit(match &block.kind {
                    BlockKind::Text => ResponseChange::TextDone {
                        item_id,
                        output_index,
                        content_index,
                        text,
                        logprobs: shape.listed(&block.logprobs),
                    },
                    BlockKind::Reasoning => ResponseChange::ReasoningDone {
                        item_id,
                        output_index,
                        content_index,
                        text,
                    },
                    BlockKind::Call(name) => ResponseChange::ArgumentsDone {
                        item_id,
                        output_index,
                        arguments: text,
                        name,
                    },
                });
                if !is_call {
                    self.emit(ResponseChange::PartDone {
                        item_id,
                        output_index,
                        content_index,
                        part: shape.part(block),
                    });
                }
                let item = shape.item(block, status);
                self.emit(ResponseChange::ItemDone { output_index, item });
            }
        }
    }
}

impl StreamEncoder for ResponseEvents {
    const DONE: bool = false;

    fn begin(&mut self, out: &mut EventText) {
        let number = &mut self.number;
        let mut emitter = Emitter { number, out };
        let response = &self.shape.going_on(&self.blocks);
        emitter.emit(ResponseChange::Created { response });
        emitter.emit(ResponseChange::InProgress { response });
    }

    fn encode(&mut self, event: GenerationEvent, out: &mut EventText) {
        let number = &mut self.number;
        let mut emitter = Emitter { number, out };
        match event {
            GenerationEvent::TextChunk(piece) => {
                let delta = self.output.push(piece);
                let status = match delta.finish {
                    Some(ChatFinish::Length) => ResponseStatus::Incomplete,
                    _ => ResponseStatus::Completed,
                };
                let shape = &self.shape;
                let emit = |at, block: &Block, change| {
                    emitter.change(shape, (at, block), &change, status);
                };
                self.blocks.add(delta, emit);
            }
            GenerationEvent::Done(usage) => {
                let response = &self.shape.ended(&self.blocks, &usage);
                self.shape.keep(response, &self.blocks);
                emitter.emit(match response.status {
                    ResponseStatus::Incomplete => ResponseChange::Incomplete { response },
                    _ => ResponseChange::Completed { response },
                });
            }
            GenerationEvent::PromptLogprobs(..)
            | GenerationEvent::Embedding(..)
            | GenerationEvent::Failed(_) => {}
        }
    }

    fn failed(&mut self, error: &ApiError, out: &mut EventText) {
        let number = &mut self.number;
        let response = &self.shape.failed(&self.blocks, error);
        Emitter { number, out }.emit(ResponseChange::Failed { response });
    }

    /// An event, as Codex ends a stream in which comments are all that comes for five minutes; a long prompt may take
    /// more. Of the known events, this one says nothing new at any time.
    fn keep_alive(&mut self, out: &mut EventText) {
        let number = &mut self.number;
        let response = &self.shape.going_on(&self.blocks);
        Emitter { number, out }.emit(ResponseChange::InProgress { response });
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::Echo;
    use super::*;
    use crate::config::ServerConfig;
    use crate::http::app::App;
    use crate::models::demo;
    use crate::output::OutputFormat;
    use crate::prompt::conversation::ChatPrompt;
    use serde_json::{Map, Value, json};
    use std::sync::Arc;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_silent_stream_is_kept_alive_by_events_with_numbers() {
        let loader = Arc::new(|_: &str| Ok(demo()));
        let app = App::new(vec!["demo".into()], loader, ServerConfig::default(), None);
        let echo = Echo {
            instructions: None,
            max_output_tokens: None,
            metadata: json!({}),
            model: "demo".into(),
            parallel_tool_calls: true,
            previous_response_id: None,
            reasoning: json!({}),
            store: false,
            temperature: 1.0,
            format: json!({}),
            tool_choice: json!("auto"),
            tools: json!([]),
            top_logprobs: 0,
            top_p: 1.0,
            user: Value::Null,
            namespaces: Map::new(),
        };
        let model = app.lease(None).await.unwrap().model();
        let shape = Shape::new(&Arc::new(app), model, echo, None);
        let prompt = ChatPrompt {
            must_call: false,
            images: Vec::new(),
            tokens: vec![5],
            output_format: OutputFormat::default(),
        };
        let mut stream = ResponseEvents::new(shape, ChatOutput::new(&prompt, 1));
        let mut text = EventText::default();
        stream.begin(&mut text);
        stream.keep_alive(&mut text);
        stream.keep_alive(&mut text);
        let events = text.data_values();
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
