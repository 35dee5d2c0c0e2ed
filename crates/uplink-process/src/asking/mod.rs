//! Approval while a guest runs: `--ask`. The process that started the guest asks a person or a program about destinations that
//! no rule covers.
//!
//! ```text
//! uplink's process ── FromUplink::Question ──> Asker ──> terminal ([`Prompt`]), command, or socket
//!                  <─── UplinkOrder::Answer ───   │
//!                                                 └────> policy file, if the answer is `always`
//! ```
//!
//! The uplink's process reads packets of the guest and is not trusted: the asker makes the subject of each question anew, bounds
//! their number, and accepts one answer to each. A question has a number for the uplink, and a random id for whoever answers. The
//! id is known to no other guest, and each guest has a connection, a command and a terminal of its own. So no answer reaches
//! another guest.
//!
//! Nothing here blocks. The owner polls the descriptors ([`Asker::fds`]), calls [`Asker::advance`], and passes the answers on.

mod by_command;
mod by_socket;
mod policy_file;
mod question;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::bail;
use ringfence_hostnet::causes::causes;
use ringfence_policy::refusal::clean;
use ringfence_policy::{Action, PolicySource};
use ringfence_uplink::egress::AskLimits;

use crate::egress::EgressArgs;
use crate::messages::{AnswerToUplink, AskedAbout};
use by_command::Commands;
use by_socket::Approver;
use policy_file::PolicyFile;
pub use question::{AnswerWord, Question};

/// Maximum number of questions that wait for an answer.
pub const AT_A_TIME: usize = 8;
/// Default time limit for an answer, in seconds.
pub const WITHIN_DEFAULT: u16 = 30;
/// Maximum time limit for an answer, in seconds.
pub const WITHIN_MAX: u16 = 3600;
/// Time after the limit until the asker forgets a question. The uplink, which has the same limit, ends it before.
const SLACK: Duration = Duration::from_secs(2);

/// Party that answers questions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskBy {
    /// Person at the terminal.
    Terminal,
    /// Command for `sh`, which is started for each question.
    Command(String),
    /// Program that listens at this Unix socket.
    Socket(PathBuf),
}

impl FromStr for AskBy {
    type Err = String;

    fn from_str(text: &str) -> Result<AskBy, String> {
        match text.split_once(':') {
            None if text == "terminal" => Ok(AskBy::Terminal),
            Some(("exec", command)) if !command.trim().is_empty() => {
                Ok(AskBy::Command(command.to_owned()))
            }
            Some(("socket", path)) if !path.is_empty() => Ok(AskBy::Socket(path.into())),
            _ => Err("say `terminal`, `exec:COMMAND` or `socket:PATH`".to_owned()),
        }
    }
}

impl fmt::Display for AskBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AskBy::Terminal => f.write_str("terminal"),
            AskBy::Command(command) => write!(f, "exec:{command}"),
            AskBy::Socket(path) => write!(f, "socket:{}", path.display()),
        }
    }
}

/// Options about questions of the egress policy.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct AskArgs {
    /// Ask about each destination that no rule covers: `terminal`, `exec:COMMAND` or `socket:PATH`
    ///
    /// The guest's packets wait for the answer: once, for this run, always, or deny. `always` adds the rule to the last file of
    /// --policy. Without an answer in time, or anybody to answer, the destination is denied. `exec:` starts the command with
    /// `sh -c` for each question, `socket:` connects to a program of yours; both speak JSON lines (docs/egress.md).
    #[arg(long, value_name = "WHO", help_heading = "Egress")]
    pub ask: Option<AskBy>,

    /// Time limit for an answer to a question of --ask
    #[arg(long, value_name = "SECONDS", requires = "ask", default_value_t = WITHIN_DEFAULT,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(WITHIN_MAX)), help_heading = "Egress")]
    pub ask_within: u16,
}

impl AskArgs {
    /// Returns the policy of a guest whose unknown destinations are asked about: what no rule covers is denied.
    ///
    /// # Errors
    ///
    /// Returns the reason for which there is nothing to ask about.
    pub fn apply(
        &self,
        policy: Option<PolicySource>,
        egress: &EgressArgs,
    ) -> anyhow::Result<Option<PolicySource>> {
        if self.ask.is_none() {
            return Ok(policy);
        }
        if egress.egress_learn.is_some() {
            bail!(
                "--egress-learn allows everything, so --ask has nothing to ask about: leave one of them out"
            );
        }
        let mut policy = policy.unwrap_or_default();
        if policy.default == Some(Action::Allow) {
            bail!("--ask: the policy says `default = \"allow\"`, so there is nothing to ask about");
        }
        policy.default = Some(Action::Deny);
        Ok(Some(policy))
    }

    fn within(&self) -> Duration {
        Duration::from_secs(self.ask_within.into())
    }

    /// Returns the limits of questions for the uplink.
    pub fn limits(&self) -> Option<AskLimits> {
        self.ask.as_ref().map(|_| AskLimits { within: self.within(), at_a_time: AT_A_TIME })
    }
}

/// Terminal on which a person answers.
pub trait Prompt {
    /// Returns `true` if a person can answer now.
    fn is_available(&self) -> bool;
    /// Shows a text and reads a line from now on.
    fn show(&mut self, text: &str);
    /// Takes the line, once it is complete.
    fn take_line(&mut self) -> Option<String>;
    /// Reads no more of the line.
    fn close(&mut self);
}

/// Channel to the party that answers.
#[derive(Debug)]
enum Way {
    /// The number of the question that is shown.
    Terminal(Option<u64>),
    Commands(Commands),
    Socket(Approver),
}

/// Open questions of one guest.
#[derive(Debug)]
pub struct Asker {
    way: Way,
    within: Duration,
    guest: String,
    file: Option<PolicyFile>,
    ids: question::Ids,
    open: Vec<Question>,
    answers: Vec<(u64, AnswerToUplink)>,
    messages: Vec<String>,
    /// Problems that were reported. Each is reported once.
    reported: Vec<String>,
}

impl Asker {
    /// Prepares the questions of a guest. Returns `None` without `--ask`. `files` are those of `--policy`.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the policy file cannot be changed later, or the current directory is unknown.
    pub fn new(
        options: &AskArgs,
        files: &[PathBuf],
        guest: String,
    ) -> anyhow::Result<Option<Asker>> {
        let Some(by) = &options.ask else { return Ok(None) };
        let way = match by {
            AskBy::Terminal => Way::Terminal(None),
            AskBy::Command(command) => Way::Commands(Commands::new(command.clone())?),
            AskBy::Socket(path) => Way::Socket(Approver::new(path)?),
        };
        let file = files.last().map(|file| PolicyFile::find(file)).transpose()?;
        Ok(Some(Asker {
            way,
            within: options.within(),
            guest,
            file,
            ids: question::Ids::default(),
            open: Vec::new(),
            answers: Vec::new(),
            messages: Vec::new(),
            reported: Vec::new(),
        }))
    }

    /// Asks a question of the uplink. One that is no question, or exceeds the limit, is denied.
    pub fn ask(&mut self, about: AskedAbout) {
        let (number, is_known) = (about.id, self.open.iter().any(|open| open.number == about.id));
        let Some(subject) = about.into_subject().filter(|_| !is_known) else { return };
        if self.open.len() >= AT_A_TIME {
            self.answers.push((number, AnswerToUplink::Unattended));
            return;
        }
        let until = Instant::now() + self.within;
        let question = Question { number, id: self.ids.next(), subject, until };
        let line =
            question.line(&self.guest, self.within, self.file.as_ref().map(PolicyFile::path));
        let asked = match &mut self.way {
            Way::Terminal(_) => Ok(()),
            Way::Commands(commands) => commands.start(&question, &self.guest, &line),
            Way::Socket(approver) => approver.send(&line),
        };
        match asked {
            Ok(()) => self.open.push(question),
            Err(problem) => {
                self.answers.push((number, AnswerToUplink::Unattended));
                self.report_once(problem);
            }
        }
    }

    /// Ends a question that the uplink does not ask any more.
    pub fn end(&mut self, number: u64) {
        let Some(at) = self.open.iter().position(|open| open.number == number) else { return };
        let question = self.open.remove(at);
        self.withdraw(&question);
    }

    /// Tells whoever was asked that an answer comes too late.
    fn withdraw(&mut self, question: &Question) {
        match &mut self.way {
            Way::Terminal(_) => {}
            Way::Commands(commands) => commands.stop(question.number),
            // A connection that fails is noticed when it is read.
            Way::Socket(approver) => drop(approver.send(&question.line_of_end())),
        }
    }

    fn report_once(&mut self, problem: String) {
        const REPORTED_MAX: usize = 16;
        if self.reported.len() < REPORTED_MAX && !self.reported.contains(&problem) {
            self.messages.push(problem.clone());
            self.reported.push(problem);
        }
    }

    /// Iterates over the descriptors to poll for reading.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let (commands, approver) = match &self.way {
            Way::Terminal(_) => (None, None),
            Way::Commands(commands) => (Some(commands), None),
            Way::Socket(approver) => (None, Some(approver)),
        };
        commands.into_iter().flat_map(Commands::fds).chain(approver.and_then(Approver::fd))
    }

    /// Returns the time at which [`Asker::advance`] must be called next.
    pub fn deadline(&self) -> Option<Instant> {
        self.open.iter().map(|open| open.until + SLACK).min()
    }

    /// Reads answers, and ends questions whose time is over.
    pub fn advance(&mut self, prompt: Option<&mut dyn Prompt>) {
        match &mut self.way {
            Way::Terminal(_) => self.advance_terminal(prompt),
            Way::Commands(commands) => {
                let answered = commands.take_answers();
                for (number, word) in answered {
                    match word {
                        Ok(word) => self.answer(|open| open.number == number, word),
                        Err(problem) => {
                            self.report_once(problem);
                            self.give_up(|open| open.number == number);
                        }
                    }
                }
            }
            Way::Socket(approver) => {
                let (answered, ended) = approver.take_answers();
                for (id, word) in answered {
                    self.answer(|open| open.id == id, word);
                }
                if let Some(problem) = ended {
                    self.report_once(problem);
                    self.give_up(|_| true);
                }
            }
        }
        let now = Instant::now();
        while let Some(late) = self.open.iter().find(|open| open.until + SLACK <= now) {
            self.end(late.number);
        }
    }

    /// Shows the oldest question, and reads the answer to it.
    fn advance_terminal(&mut self, prompt: Option<&mut dyn Prompt>) {
        let Way::Terminal(shown) = &mut self.way else { return };
        let (prompt, hidden) = match prompt {
            Some(prompt) if prompt.is_available() => (Some(prompt), None),
            other => (None, other),
        };
        let Some(prompt) = prompt else {
            let was_shown = shown.take().is_some();
            if let (Some(prompt), true) = (hidden, was_shown) {
                prompt.close();
            }
            if !self.open.is_empty() {
                self.report_once(
                    "--ask terminal: no terminal in whose foreground somebody could answer; `exec:` and `socket:` need none"
                        .to_owned(),
                );
                self.give_up(|_| true);
            }
            return;
        };
        if let Some(number) = *shown {
            let is_open = self.open.iter().any(|open| open.number == number);
            let line = prompt.take_line();
            let word = line.as_deref().map(AnswerWord::of_key);
            match (is_open, word) {
                (true, None) => return,
                (true, Some(Some(word))) => {
                    self.answer(|open| open.number == number, word);
                }
                // It is shown again.
                (true, Some(None)) => {}
                (false, _) => {}
            }
            prompt.close();
            self.way = Way::Terminal(None);
        }
        if let Some(next) = self.open.first() {
            let text = next.prompt(&self.guest, self.file.as_ref().map(PolicyFile::path));
            prompt.show(&text);
            self.way = Way::Terminal(Some(next.number));
        }
    }

    /// Denies questions that nobody can answer.
    fn give_up(&mut self, is_it: impl Fn(&Question) -> bool) {
        for question in self.open.extract_if(.., |open| is_it(open)) {
            self.answers.push((question.number, AnswerToUplink::Unattended));
        }
    }

    /// Applies the answer to a question that is open. Others are passed to the uplink as well, which counts them.
    fn answer(&mut self, is_it: impl Fn(&Question) -> bool, word: AnswerWord) {
        let Some(at) = self.open.iter().position(is_it) else {
            /// Number of no question.
            const NONE: u64 = 0;
            self.answers.push((NONE, AnswerToUplink::Deny));
            return;
        };
        let question = self.open.remove(at);
        let subject = &question.subject;
        let (answer, text) = match word {
            AnswerWord::Once => (AnswerToUplink::Once, format!("approved {subject} once")),
            AnswerWord::Run => (AnswerToUplink::Run, format!("approved {subject} for this run")),
            AnswerWord::Always => (AnswerToUplink::Run, self.approve_always(&question)),
            AnswerWord::Deny => (AnswerToUplink::Deny, format!("denied {subject} for this run")),
        };
        self.messages.push(clean(&text));
        self.answers.push((question.number, answer));
    }

    /// Adds the rule to the policy file. Returns the message about it.
    fn approve_always(&self, question: &Question) -> String {
        let subject = &question.subject;
        let Some(file) = &self.file else {
            return format!(
                "approved {subject} for this run; there is no file of --policy for always"
            );
        };
        let shown = file.path().display();
        match file.add(subject) {
            Ok(()) => format!("approved {subject} always, in {shown}"),
            Err(error) => {
                let why = causes(&error);
                format!("approved {subject} for this run; {shown} was not changed: {why}")
            }
        }
    }

    /// Takes the answers for the uplink, with the numbers of its questions.
    pub fn take_answers(&mut self) -> Vec<(u64, AnswerToUplink)> {
        std::mem::take(&mut self.answers)
    }

    /// Takes messages for the user.
    pub fn take_messages(&mut self) -> Vec<String> {
        std::mem::take(&mut self.messages)
    }
}

#[cfg(test)]
mod tests;
