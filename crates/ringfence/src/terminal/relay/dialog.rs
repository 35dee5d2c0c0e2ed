//! Dialog: a question of the launcher on the user's terminal, and a short line in answer.
//!
//! While a dialog is open, the command's output waits, so that it cannot cover or change the question, and no key reaches the
//! command but Ctrl-C, which also denies. Keys that were typed before the question, or within [`IGNORED_FOR`] of it, are dropped:
//! they were not meant for it. Only single lower-case letters and Enter make an answer.

use std::time::{Duration, Instant};

use rustix::termios::{LocalModes, QueueSelector};

use super::{Pending, Relay};
use crate::terminal::UserTerminal;

/// Time for which keys are dropped, from the question on.
const IGNORED_FOR: Duration = Duration::from_millis(500);
/// Ends a control sequence that the command has left open, and its attributes and character sets.
const RESET: &str = "\x18\x1b\\\x1b[0m\x1b(B\x0f\r\n";
/// Ctrl-C, and the answer that it stands for.
const INTERRUPT: u8 = 3;
const DENY: &str = "d";

/// Question on the user's terminal.
#[derive(Debug)]
pub(super) struct Dialog {
    /// Text that is not written yet.
    pub(super) text: Pending,
    line: String,
    /// Set once the line holds something else than one letter.
    is_spoilt: bool,
    answer: Option<String>,
    since: Instant,
    /// Set if the terminal is the command's only for the dialog.
    detaches: bool,
}

impl Dialog {
    fn new(text: &str, detaches: bool) -> Dialog {
        let bytes = format!("{RESET}{}", text.replace('\n', "\r\n")).into_bytes();
        let text = Pending { bytes, sent: 0 };
        let (line, since) = (String::new(), Instant::now());
        Dialog { text, line, is_spoilt: false, answer: None, since, detaches }
    }

    /// Takes keys. Returns `true` if Ctrl-C is among them.
    pub(super) fn take_keys(&mut self, keys: &[u8]) -> bool {
        if keys.contains(&INTERRUPT) {
            self.answer = Some(DENY.to_owned());
            return true;
        }
        if self.since.elapsed() < IGNORED_FOR {
            return false;
        }
        for key in keys {
            match key {
                _ if self.answer.is_some() => {}
                b'\r' | b'\n' => {
                    let line = std::mem::take(&mut self.line);
                    let is_answer = !std::mem::take(&mut self.is_spoilt);
                    self.answer = Some(if is_answer { line } else { String::new() });
                }
                8 | 0x7f => {
                    if !self.is_spoilt && self.line.pop().is_some() {
                        self.text.bytes.extend_from_slice(b"\x08 \x08");
                    }
                }
                letter if letter.is_ascii_lowercase() && self.line.is_empty() => {
                    self.line.push(char::from(*letter));
                    self.text.bytes.push(*letter);
                }
                _ => self.is_spoilt = true,
            }
        }
        false
    }
}

impl Relay {
    /// Returns `true` if a person can answer at the user's terminal: no other program reads its keys.
    pub(crate) fn can_ask(&self) -> bool {
        let reads_lines = |user: &UserTerminal| {
            user.modes().is_some_and(|modes| modes.local_modes.contains(LocalModes::ICANON))
        };
        let is_free = self.is_attached()
            || self.dialog.is_none() && self.user.as_ref().is_some_and(reads_lines);
        is_free && self.is_foreground()
    }

    /// Returns `true` while a question is on the terminal.
    pub(crate) fn is_in_dialog(&self) -> bool {
        self.dialog.is_some()
    }

    /// Shows a question, and reads a line from now on.
    pub(crate) fn begin_dialog(&mut self, text: &str) {
        let detaches = !self.is_attached();
        if detaches {
            self.attach(true);
        }
        if let Some(user) = &self.user {
            let _ = rustix::termios::tcflush(&user.file, QueueSelector::IFlush);
        }
        self.dialog = Some(Dialog::new(text, detaches));
        self.write_output();
    }

    /// Takes the line, once it is complete.
    pub(crate) fn take_dialog_line(&mut self) -> Option<String> {
        self.dialog.as_mut().and_then(|dialog| dialog.answer.take())
    }

    /// Ends the dialog. The command's output goes on.
    pub(crate) fn end_dialog(&mut self) {
        let Some(mut dialog) = self.dialog.take() else { return };
        dialog.text.bytes.extend_from_slice(b"\r\n");
        let rest = dialog.text.bytes.split_off(dialog.text.sent);
        let at = self.to_user.sent;
        drop(self.to_user.bytes.splice(at..at, rest));
        self.write_output();
        if dialog.detaches {
            self.detach();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(keys: &[&[u8]]) -> Option<String> {
        let mut dialog = Dialog::new("?", false);
        dialog.since = Instant::now().checked_sub(IGNORED_FOR).unwrap();
        for keys in keys {
            dialog.take_keys(keys);
        }
        dialog.answer
    }

    #[test]
    fn answer_is_one_letter_and_enter() {
        for (keys, answer) in [
            (&[&b"r\r"[..]][..], Some("r")),
            (&[b"o", b"\n"], Some("o")),
            (&[b"o\x7fd\r"], Some("d")),
            (&[b"o"], None),
            (&[b"\r"], Some("")),
            (&[b"apt-get\r"], Some("")),
            // The key of an arrow, and Enter.
            (&[b"\x1b[A\r"], Some("")),
            (&[b"\x1ba\r"], Some("")),
            (&[b"A\r"], Some("")),
            (&[b"\x03"], Some("d")),
            (&[b"a\x03"], Some("d")),
            (&[b"d\rr\r"], Some("d")),
        ] {
            assert_eq!(typed(keys).as_deref(), answer, "{keys:?}");
        }
    }

    #[test]
    fn keys_typed_as_the_question_appears_are_dropped() {
        let mut dialog = Dialog::new("?", false);
        assert!(!dialog.take_keys(b"a\r") && dialog.answer.is_none() && dialog.line.is_empty());
        assert!(dialog.take_keys(b"\x03"), "but for Ctrl-C");
    }
}
