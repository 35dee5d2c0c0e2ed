//! Questions and answers as text: JSON lines for programs, and prompts for people.
//!
//! | line | fields |
//! |---|---|
//! | question | `version`, `question` (its id), `guest`, `rule` (that an approval adds), `name` or `address`, `port`, `protocol`, `unicode` (of a name with `xn--`), `always` (file, or null), `seconds` |
//! | end of a question without an answer | `version`, `end` (its id) |
//! | answer | `question`, `answer`: `once`, `run`, `always` or `deny` |

use std::fmt::Write as _;
use std::hash::BuildHasher;
use std::hash::RandomState;
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_base::json::escape_controls;
use ringfence_policy::Subject;
use ringfence_policy::approvals::Host;
use ringfence_policy::refusal::{clean, unicode_of};
use serde::{Deserialize, Serialize};

/// Version of the JSON lines. It grows when a field changes its meaning.
const VERSION: u32 = 1;

/// Answers of a person or program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AnswerWord {
    Once,
    Run,
    Always,
    Deny,
}

impl AnswerWord {
    /// Reads the key that a person has typed.
    pub(super) fn of_key(line: &str) -> Option<AnswerWord> {
        match line {
            "o" => Some(AnswerWord::Once),
            "r" => Some(AnswerWord::Run),
            "a" => Some(AnswerWord::Always),
            "d" => Some(AnswerWord::Deny),
            _ => None,
        }
    }

    /// Reads the answer of a command: the word, or a JSON line.
    pub(super) fn of_output(text: &str) -> Option<AnswerWord> {
        let line = text.lines().next()?.trim();
        match serde_json::from_str(&format!("\"{line}\"")) {
            Ok(word) => Some(word),
            Err(_) => serde_json::from_str::<AnswerLine>(line).ok().map(|line| line.answer),
        }
    }
}

/// Line of a program that answers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct AnswerLine {
    #[serde(default)]
    pub(super) question: String,
    pub(super) answer: AnswerWord,
}

/// Question that waits for an answer.
#[derive(Clone, Debug)]
pub struct Question {
    /// Number at the uplink.
    pub(super) number: u64,
    /// Id for whoever answers.
    pub(super) id: String,
    pub(super) subject: Subject,
    /// End of its time.
    pub(super) until: Instant,
}

/// Source of ids that nobody can guess, and that no other guest has.
#[derive(Debug, Default)]
pub(super) struct Ids {
    keys: [RandomState; 2],
    count: u64,
}

impl Ids {
    pub(super) fn next(&mut self) -> String {
        self.count += 1;
        // Keyed hashes, whose keys come from the kernel.
        let [high, low] = [0, 1].map(|key: usize| self.keys[key].hash_one(self.count));
        format!("{high:016x}{low:016x}")
    }
}

#[derive(Serialize)]
struct QuestionLine<'a> {
    version: u32,
    question: &'a str,
    guest: &'a str,
    rule: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unicode: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<std::net::IpAddr>,
    port: u16,
    protocol: String,
    always: Option<String>,
    seconds: u64,
}

#[derive(Serialize)]
struct EndLine<'a> {
    version: u32,
    end: &'a str,
}

/// Writes a value as one line without control characters.
fn line_of(value: &impl Serialize) -> String {
    // Serialization into memory fails for no value of these types.
    escape_controls(serde_json::to_string(value).unwrap_or_default()) + "\n"
}

impl Question {
    /// Writes the question for a program. `file` is the policy file that `always` changes.
    pub(super) fn line(&self, guest: &str, within: Duration, file: Option<&Path>) -> String {
        let Subject { host, port, protocol } = &self.subject;
        let (name, address) = match host {
            Host::Name(name) => (Some(name), None),
            Host::Address(ip) => (None, Some(*ip)),
        };
        line_of(&QuestionLine {
            version: VERSION,
            question: &self.id,
            guest,
            rule: self.subject.to_string(),
            name: name.map(ringfence_policy::HostName::as_str),
            unicode: name.and_then(unicode_of),
            address,
            port: *port,
            protocol: protocol.to_string(),
            always: file.map(|file| file.display().to_string()),
            seconds: within.as_secs(),
        })
    }

    /// Writes the end of the question for a program.
    pub(super) fn line_of_end(&self) -> String {
        line_of(&EndLine { version: VERSION, end: &self.id })
    }

    /// Describes the question to a person, in lines without control characters.
    pub(super) fn prompt(&self, guest: &str, file: Option<&Path>) -> String {
        let mut text = format!("guest {guest} wants {}", self.subject);
        if let Some(unicode) = self.subject.name().and_then(unicode_of) {
            let _ = write!(text, ", which reads {unicode}");
        }
        let always =
            file.map(|file| format!(", a always ({})", base_name(file))).unwrap_or_default();
        let left = self.until.saturating_duration_since(Instant::now()).as_secs_f64().ceil();
        let keys = format!("o once, r for this run{always}, d deny, then Enter ({left} s): ");
        format!("ringfence: {}\nringfence: {}", clean(&text), clean(&keys))
    }
}

/// Returns the file name without its folders.
fn base_name(path: &Path) -> String {
    path.file_name()
        .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use ringfence_policy::{HostName, Protocol};

    use super::*;

    pub(crate) fn question(host: &str) -> Question {
        let host = match host.parse() {
            Ok(ip) => Host::Address(ip),
            Err(_) => Host::Name(HostName::parse(host).unwrap()),
        };
        let subject = Subject { host, port: 443, protocol: Protocol::Tcp };
        Question { number: 1, id: Ids::default().next(), subject, until: Instant::now() }
    }

    #[test]
    fn question_is_one_line_of_json_with_the_rule_that_it_adds() {
        let within = Duration::from_secs(30);
        let line =
            question("xn--bcher-kva.example").line("web\u{9b}", within, Some(Path::new("/p.toml")));
        assert!(line.ends_with('\n') && line.matches('\n').count() == 1);
        assert!(!line.trim_end().contains(char::is_control), "{line:?}");
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(json["version"], 1);
        assert_eq!(json["rule"], "xn--bcher-kva.example:443");
        assert_eq!(json["unicode"], "bücher.example");
        assert_eq!((&json["always"], &json["seconds"]), (&"/p.toml".into(), &30.into()));
        let line = question("203.0.113.1").line("web", within, None);
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(json["address"], "203.0.113.1");
        assert!(json["always"].is_null() && json.get("name").is_none());
    }

    #[test]
    fn prompt_shows_the_ascii_form_first_and_no_control_character() {
        let text = question("xn--pple-43d.com").prompt("web", Some(Path::new("/x/p.toml")));
        let (first, second) = text.split_once('\n').unwrap();
        assert_eq!(
            first,
            "ringfence: guest web wants xn--pple-43d.com:443, which reads \u{430}pple.com"
        );
        assert!(second.contains("a always (p.toml), d deny"), "{second}");
        let text =
            question("a.org").prompt("w\u{1b}[2J\u{202e}", Some(Path::new("/\u{1b}]0;x\u{7}")));
        let is_wrong = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(is_wrong), "{text:?}");
        assert!(!question("a.org").prompt("w", None).contains("always"));
    }

    #[test]
    fn answer_of_a_command_is_a_word_or_a_line_of_json() {
        for (text, word) in [
            ("once\n", Some(AnswerWord::Once)),
            ("  run \nmore", Some(AnswerWord::Run)),
            ("{\"question\":\"x\",\"answer\":\"always\"}", Some(AnswerWord::Always)),
            ("{\"answer\":\"deny\"}\n", Some(AnswerWord::Deny)),
            ("", None),
            ("yes", None),
            ("ONCE", None),
            ("\nonce", None),
            ("once\" ", None),
        ] {
            assert_eq!(AnswerWord::of_output(text), word, "{text:?}");
        }
    }

    #[test]
    fn ids_differ_between_questions_and_guests() {
        let (mut one, mut other) = (Ids::default(), Ids::default());
        let ids = [one.next(), one.next(), other.next(), other.next()];
        for (at, id) in ids.iter().enumerate() {
            assert!(id.len() == 32 && !ids[..at].contains(id), "{ids:?}");
        }
    }
}
