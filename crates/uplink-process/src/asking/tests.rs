use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use ringfence_policy::Protocol;
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};

use super::*;

fn asker(by: &str, files: &[PathBuf]) -> Asker {
    let ask = AskArgs { ask: Some(by.parse().unwrap()), ask_within: 30 };
    Asker::new(&ask, files, "web".to_owned()).unwrap().unwrap()
}

fn about(id: u64, name: &str) -> AskedAbout {
    let name = Some(name.to_owned());
    AskedAbout { id, name, address: None, port: 443, protocol: Protocol::Tcp }
}

/// Advances until there are `count` answers.
fn answers(asker: &mut Asker, count: usize) -> Vec<(u64, AnswerToUplink)> {
    let mut answers = Vec::new();
    while answers.len() < count {
        asker.advance(None);
        answers.extend(asker.take_answers());
        if answers.len() < count {
            let fds: Vec<_> = asker.fds().collect();
            assert!(!fds.is_empty(), "nobody answers: {answers:?}");
            let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            wait_any(&mut fds, None).unwrap();
        }
    }
    answers
}

struct Program {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Program {
    fn accept(listener: &UnixListener) -> Program {
        let stream = listener.accept().unwrap().0;
        Program { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    fn read(&mut self) -> serde_json::Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn answer(&mut self, question: &serde_json::Value, answer: &str) {
        let line = serde_json::json!({ "question": question, "answer": answer });
        writeln!(self.stream, "{line}").unwrap();
    }
}

#[test]
fn way_of_asking_is_parsed_and_written_alike() {
    for text in ["terminal", "exec:notify --ask", "socket:/run/user/1/ask"] {
        assert_eq!(text.parse::<AskBy>().unwrap().to_string(), text);
    }
    for text in ["", "Terminal", "/run/ask", "exec:", "exec: ", "socket:", "notify"] {
        assert!(text.parse::<AskBy>().unwrap_err().contains("exec:COMMAND"), "{text}");
    }
}

#[test]
fn program_at_a_socket_answers_in_any_order_and_each_question_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ask");
    let listener = UnixListener::bind(&path).unwrap();
    let mut asker = asker(&format!("socket:{}", path.display()), &[]);
    for (id, name) in [(1, "a.org"), (2, "b.org"), (3, "c.org")] {
        asker.ask(about(id, name));
    }
    let mut program = Program::accept(&listener);
    let questions: Vec<_> = (0..3).map(|_| program.read()).collect();
    assert_eq!(questions[1]["rule"], "b.org:443");
    for (question, answer) in [(2, "run"), (0, "once"), (0, "deny"), (1, "deny")] {
        program.answer(&questions[question]["question"], answer);
    }
    program.answer(&"0123456789abcdef0123456789abcdef".into(), "run");
    let answers = answers(&mut asker, 5);
    use AnswerToUplink::{Deny, Once, Run};
    // Number 0 is that of no question: the uplink counts and ignores the answer.
    assert_eq!(answers, [(3, Run), (1, Once), (0, Deny), (2, Deny), (0, Deny)]);
    let messages = asker.take_messages();
    assert_eq!(messages[..2], ["approved c.org:443 for this run", "approved a.org:443 once"]);
    // A question that is over is withdrawn, and its answer comes too late.
    asker.ask(about(4, "d.org"));
    let late = program.read();
    asker.end(4);
    assert_eq!(program.read()["end"], late["question"]);
    program.answer(&late["question"], "run");
    assert_eq!(self::answers(&mut asker, 1), [(0, Deny)]);
}

#[test]
fn answer_to_another_guests_question_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ask");
    let listener = UnixListener::bind(&path).unwrap();
    let by = format!("socket:{}", path.display());
    let (mut one, mut other) = (asker(&by, &[]), asker(&by, &[]));
    one.ask(about(1, "a.org"));
    let mut of_one = Program::accept(&listener);
    other.ask(about(1, "a.org"));
    let mut of_other = Program::accept(&listener);
    let (first, _second) = (of_one.read(), of_other.read());
    of_other.answer(&first["question"], "run");
    assert_eq!(answers(&mut other, 1), [(0, AnswerToUplink::Deny)]);
    of_one.answer(&first["question"], "run");
    assert_eq!(answers(&mut one, 1), [(1, AnswerToUplink::Run)]);
}

#[test]
fn question_is_denied_at_once_if_nobody_answers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ask");
    let by = format!("socket:{}", path.display());
    let mut asker = asker(&by, &[]);
    asker.ask(about(1, "a.org"));
    assert_eq!(answers(&mut asker, 1), [(1, AnswerToUplink::Unattended)]);
    // A program that comes later gets later questions. They end with it, or with a line that is no answer.
    let listener = UnixListener::bind(&path).unwrap();
    asker.ask(about(2, "a.org"));
    drop(Program::accept(&listener));
    assert_eq!(answers(&mut asker, 1), [(2, AnswerToUplink::Unattended)]);
    asker.ask(about(3, "a.org"));
    writeln!(Program::accept(&listener).stream, "yes").unwrap();
    assert_eq!(answers(&mut asker, 1), [(3, AnswerToUplink::Unattended)]);
    asker.ask(about(4, "a.org"));
    // The connection may end before all of it is written.
    let _ = writeln!(Program::accept(&listener).stream, "{}", "x".repeat(1 << 16));
    assert_eq!(answers(&mut asker, 1), [(4, AnswerToUplink::Unattended)]);

    let mut asker = self::asker("terminal", &[]);
    asker.ask(about(1, "a.org"));
    assert_eq!(answers(&mut asker, 1), [(1, AnswerToUplink::Unattended)]);
}

#[test]
fn command_answers_by_a_word_or_its_end_denies() {
    let script = "read -r line; case $line in *'\"rule\":\"a.org:443\"'*) echo run;; esac; \
         test \"$RINGFENCE_ASK_RULE\" = b.org:443 && echo '{\"answer\":\"once\"}'; \
         test \"$RINGFENCE_ASK_GUEST\" = web";
    let mut asker = asker(&format!("exec:{script}"), &[]);
    for (id, name) in [(1, "a.org"), (2, "b.org"), (3, "c.org")] {
        asker.ask(about(id, name));
    }
    let mut answers = answers(&mut asker, 3);
    answers.sort_unstable_by_key(|(id, _)| *id);
    use AnswerToUplink::{Once, Run, Unattended};
    assert_eq!(answers, [(1, Run), (2, Once), (3, Unattended)]);
    let messages = asker.take_messages();
    assert!(
        messages.iter().any(|text| text.ends_with("none of once, run, always, deny")),
        "{messages:?}"
    );
}

#[test]
fn command_ends_with_its_question() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let mut asker = asker(&format!("exec:exec 3<>{0}; sleep 1000 & wait", fifo.display()), &[]);
    asker.ask(about(1, "a.org"));
    // The pipe has a writer as long as one process of the command runs.
    let mut reader = std::fs::File::open(&fifo).unwrap();
    asker.end(1);
    assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
    assert!(asker.take_answers().is_empty());
}

#[test]
fn approval_for_ever_is_added_to_the_last_policy_file() {
    let directory = tempfile::tempdir().unwrap();
    let files = ["a.toml", "b.toml"].map(|name| directory.path().join(name));
    for file in &files {
        std::fs::write(file, "allow = ['x.org']\n").unwrap();
    }
    let mut asker = asker("exec:echo always", &files);
    asker.ask(about(1, "a.org"));
    assert_eq!(answers(&mut asker, 1), [(1, AnswerToUplink::Run)]);
    let texts = files.map(|file| std::fs::read_to_string(file).unwrap());
    assert_eq!(texts, ["allow = ['x.org']\n", "allow = [\"a.org:443\", 'x.org']\n"]);
    assert!(asker.take_messages()[0].starts_with("approved a.org:443 always, in "));

    let mut asker = self::asker("exec:echo always", &[]);
    asker.ask(about(1, "a.org"));
    assert_eq!(answers(&mut asker, 1), [(1, AnswerToUplink::Run)]);
    assert!(asker.take_messages()[0].contains("no file of --policy"));
}

#[test]
fn question_of_a_hostile_uplink_is_refused() {
    let mut asker = asker("exec:echo run", &[]);
    let address =
        |ip: &str| AskedAbout { name: None, address: Some(ip.parse().unwrap()), ..about(9, "") };
    let hostile = [
        about(1, "*.org"),
        about(2, "a.org\"]\nallow = [\"*"),
        about(3, "a b"),
        AskedAbout { port: 0, ..about(4, "a.org") },
        AskedAbout { protocol: Protocol::Icmp, ..about(5, "a.org") },
        AskedAbout { name: None, ..about(6, "") },
        AskedAbout { address: Some([203, 0, 113, 1].into()), ..about(7, "a.org") },
        address("169.254.169.254"),
        address("fd00:ec2::254"),
        address("127.0.0.1"),
    ];
    hostile.into_iter().for_each(|about| asker.ask(about));
    assert!(asker.open.is_empty() && asker.take_answers().is_empty());
    let mut asker = self::asker("exec:sleep 1000", &[]);
    for id in 0..100 {
        asker.ask(about(id % 50, "a.org"));
    }
    assert_eq!(asker.open.len(), AT_A_TIME);
}

/// Terminal of a person who types what a test says.
#[derive(Default)]
struct Typist {
    is_away: bool,
    shown: Vec<String>,
    is_open: bool,
    line: Option<&'static str>,
}

impl Prompt for Typist {
    fn is_available(&self) -> bool {
        !self.is_away
    }
    fn show(&mut self, text: &str) {
        assert!(!self.is_open);
        self.is_open = true;
        self.shown.push(text.to_owned());
    }
    fn take_line(&mut self) -> Option<String> {
        self.line.take().map(str::to_owned)
    }
    fn close(&mut self) {
        self.is_open = false;
    }
}

#[test]
fn person_at_the_terminal_answers_one_question_after_the_other() {
    let mut typist = Typist::default();
    let mut asker = asker("terminal", &[]);
    for (id, name) in [(1, "a.org"), (2, "b.org"), (3, "c.org")] {
        asker.ask(about(id, name));
    }
    for line in [None, Some("yes"), Some("r"), None, Some("d")] {
        typist.line = line;
        asker.advance(Some(&mut typist));
    }
    use AnswerToUplink::{Deny, Run, Unattended};
    assert_eq!(asker.take_answers(), [(1, Run), (2, Deny)]);
    let names: Vec<_> = typist.shown.iter().map(|text| text.contains("a.org:443")).collect();
    // A line that is no answer shows the question again.
    assert_eq!(names, [true, true, false, false]);
    assert!(typist.is_open && typist.shown[3].contains("c.org:443"));
    typist.is_away = true;
    asker.advance(Some(&mut typist));
    assert!(!typist.is_open);
    assert_eq!(asker.take_answers(), [(3, Unattended)]);
}

#[test]
fn policy_of_a_guest_with_questions_denies_the_rest() {
    let ask = AskArgs { ask: Some(AskBy::Terminal), ask_within: 30 };
    let egress = EgressArgs::default();
    let applied = ask.apply(None, &egress).unwrap().unwrap();
    assert_eq!(applied.default, Some(Action::Deny));
    let open = PolicySource { default: Some(Action::Allow), ..PolicySource::default() };
    assert!(ask.apply(Some(open.clone()), &egress).is_err());
    let learns = EgressArgs { egress_learn: Some("x".into()), ..EgressArgs::default() };
    assert!(ask.apply(None, &learns).is_err());
    assert_eq!(AskArgs::default().apply(Some(open.clone()), &learns).unwrap(), Some(open));
}
