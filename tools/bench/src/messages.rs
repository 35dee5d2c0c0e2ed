//! Message transport between the processes of a benchmark: one line of JSON for each message.

use std::io::{self, BufRead, BufReader, Write};
use std::process::ChildStdout;
use std::sync::mpsc::{Receiver, channel};

use ringfence_hostnet::causes::causes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::harness::STATUS_BENCH_FAILED;

/// Reads a process's messages until it ends or the receiver is dropped. A line that is no such message
/// is returned as `failed`.
///
/// # Errors
///
/// Returns an error if no thread can be started.
pub(super) fn listen<S: DeserializeOwned + Send + 'static>(
    output: ChildStdout,
    failed: fn(String) -> S,
) -> io::Result<Receiver<S>> {
    let (tell, said) = channel();
    std::thread::Builder::new().name("said".to_owned()).spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let heard = serde_json::from_str(&line);
            let heard = heard.unwrap_or_else(|_| failed(format!("it said {line:?}")));
            if tell.send(heard).is_err() {
                return;
            }
        }
    })?;
    Ok(said)
}

/// Writes a message to standard output.
pub(super) fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}

/// Returns the exit status for the outcome of a process; also writes a failure as a message.
pub(super) fn exit_status<S: Serialize>(
    outcome: anyhow::Result<()>,
    failed: impl FnOnce(String) -> S,
) -> u8 {
    outcome.map_or_else(
        |error| {
            // A closed pipe means that the parent is gone.
            let _ = say(&failed(causes(&error)));
            STATUS_BENCH_FAILED
        },
        |()| 0,
    )
}
