//! Commands: printing and running them, and counting the tests of a test run.
//!
//! Each command is printed in the form in which a user can type it. The output of a test run is passed on
//! line by line and parsed, so that the report has the number of tests and the names of skipped ones.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Profile of the test programs (`Cargo.toml`). Builds by it share macros and build scripts.
pub const TEST_PROFILE: &str = "suite";

/// Time without a line of output after which a test program counts as hung. No single test takes half of it.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// Command line with its changes to the environment.
pub struct Cmd {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(String, OsString)>,
    env_removed: Vec<String>,
    /// Starts of the variables that the command inherits; `None` stands for all.
    env_inherited: Option<&'static [&'static str]>,
}

impl Cmd {
    /// Creates a command that runs `program` without arguments.
    pub fn new(program: impl Into<OsString>) -> Cmd {
        Cmd {
            program: program.into(),
            args: vec![],
            env: vec![],
            env_removed: vec![],
            env_inherited: None,
        }
    }

    /// Creates a command that runs the cargo of this xtask.
    pub fn cargo() -> Cmd {
        Cmd::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// Appends arguments to the command line.
    pub fn args<I: IntoIterator<Item: Into<OsString>>>(mut self, args: I) -> Cmd {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable in the command's environment.
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Cmd {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Removes a variable from the command's environment.
    pub fn env_remove(mut self, name: &str) -> Cmd {
        self.env_removed.push(name.to_owned());
        self
    }

    /// Limits the variables that the command inherits to those whose names begin with one of these words.
    pub fn env_inherit_only(mut self, starts: &'static [&'static str]) -> Cmd {
        self.env_inherited = Some(starts);
        self
    }

    /// Runs the command with this process's standard streams. Returns `true` if it succeeded.
    pub fn run(&self, directory: &Path) -> io::Result<bool> {
        self.print();
        Ok(self.build(directory).status()?.success())
    }

    /// Runs the command without output. Returns `true` if it started and succeeded.
    pub fn probe(&self) -> bool {
        let mut command = self.build(Path::new("."));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Runs the command and returns its standard output, or its standard error if it failed.
    pub fn output(&self, directory: &Path) -> io::Result<Result<String, String>> {
        let output = self.build(directory).stdin(Stdio::null()).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        })
    }

    /// Runs the command with its output in a new file. Returns its exit status: 128 and the number for a signal.
    pub fn run_to_file(&self, directory: &Path, output: &Path) -> io::Result<i32> {
        let file = std::fs::File::create(output)?;
        let mut command = self.build(directory);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let status = command.status()?;
        Ok(status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(-1))
    }

    /// Prints and runs the command with its standard error passed on. Returns its standard output, or `None` if it failed.
    pub fn captured(&self, directory: &Path) -> io::Result<Option<String>> {
        self.print();
        let output =
            self.build(directory).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        let text = || String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(output.status.success().then(text))
    }

    /// Starts the command without standard streams.
    pub fn spawn_silently(&self, directory: &Path) -> io::Result<std::process::Child> {
        let mut command = self.build(directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }

    /// Runs a test program, counts its tests, and returns its output as well.
    pub fn run_tests_silently(&self, directory: &Path) -> io::Result<(TestRun, Vec<u8>)> {
        let mut output = Vec::new();
        let run = self.read_tests(directory, &mut output)?;
        Ok((run, output))
    }

    /// Runs a `cargo test`, passes its output on line by line, and counts its tests.
    pub fn run_tests(&self, directory: &Path) -> io::Result<TestRun> {
        self.print();
        self.read_tests(directory, &mut io::stdout())
    }

    fn read_tests(&self, directory: &Path, out: &mut impl Write) -> io::Result<TestRun> {
        self.read_tests_within(directory, out, SILENCE_MAX)
    }

    fn read_tests_within(
        &self,
        directory: &Path,
        out: &mut impl Write,
        silence_max: Duration,
    ) -> io::Result<TestRun> {
        // One pipe for both streams keeps their lines in order.
        let (reader, writer) = io::pipe()?;
        let mut command = self.build(directory);
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn()?;
        // The command holds write ends of the pipe. Without this drop the reader sees no end of file.
        drop(command);
        let lines = lines_of(reader);
        let mut run = TestRun::default();
        loop {
            match lines.recv_timeout(silence_max) {
                Ok(line) => {
                    out.write_all(&line)?;
                    run.parse_line(&String::from_utf8_lossy(&line));
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // Processes that it started may hold the pipe open, so its end is not waited for.
                    child.kill()?;
                    let seconds = silence_max.as_secs();
                    let why =
                        format!("no output for {seconds} s: the test program hung and was killed");
                    writeln!(out, "{why}")?;
                    run.failures.push(("(a test that did not end)".to_owned(), why));
                    break;
                }
            }
        }
        run.success = child.wait()?.success();
        Ok(run)
    }

    fn build(&self, directory: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).current_dir(directory);
        if let Some(starts) = self.env_inherited {
            let is_inherited = |name: &OsString| {
                starts.iter().any(|start| name.as_bytes().starts_with(start.as_bytes()))
            };
            command.env_clear();
            command.envs(std::env::vars_os().filter(|(name, _)| is_inherited(name)));
        }
        for name in &self.env_removed {
            command.env_remove(name);
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    fn print(&self) {
        let mut words: Vec<String> = self
            .env
            .iter()
            // The variable has the user's directories and a few more, see `Toolbox::path`.
            .filter(|(name, _)| name != "PATH")
            .map(|(name, value)| format!("{name}={}", quote(&value.to_string_lossy())))
            .collect();
        let program = Path::new(&self.program);
        words.push(program.file_name().unwrap_or(&self.program).to_string_lossy().into_owned());
        words.extend(self.args.iter().map(|arg| quote(&arg.to_string_lossy())));
        println!("$ {}", words.join(" "));
    }
}

/// Reads lines, with their ends, in a thread of their own.
fn lines_of(reader: impl io::Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length != 0) {
            if sender.send(std::mem::take(&mut line)).is_err() {
                break;
            }
        }
    });
    lines
}

/// Quotes `word` for a shell if necessary.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Returns `true` if standard output is a terminal. Commands behind a pipe then keep their colours.
pub fn on_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Results of test programs, parsed from their output.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TestRun {
    /// Set if the command succeeded.
    pub success: bool,
    /// Number of tests that passed, skipped tests included.
    pub passed: u64,
    pub failed: u64,
    /// Number of tests marked `#[ignore]`.
    pub ignored: u64,
    /// Name and reason of each test that skipped itself.
    pub skipped: Vec<(String, String)>,
    /// Name of each failed test, and the first line of its panic.
    pub failures: Vec<(String, String)>,
    /// Name and duration of each test whose program printed it (`--report-time`).
    pub times: Vec<(String, Duration)>,
    /// Name of the test whose output is being parsed.
    pub current: String,
    /// Set if the next line is the message of a panic.
    pub in_panic: bool,
}

impl TestRun {
    /// Returns the number of tests that ran and were not skipped.
    pub fn ran(&self) -> u64 {
        let skipped = u64::try_from(self.skipped.len()).unwrap_or(u64::MAX);
        (self.passed + self.failed).saturating_sub(skipped)
    }

    /// Parses one line of libtest's output with `--show-output`: a section `---- NAME stdout ----` for each
    /// test, in which a skipped test has printed `SKIPPED: reason`, and a summary for each test program.
    fn parse_line(&mut self, line: &str) {
        let line = without_colours(line);
        let line = line.trim();
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
        {
            self.current = name.to_owned();
        } else if std::mem::take(&mut self.in_panic) {
            self.note_panic(line);
        } else if let Some((test, verdict)) =
            line.strip_prefix("test ").and_then(|l| l.split_once(" ... "))
        {
            self.note_verdict(test, verdict);
        } else if line.starts_with("thread '") && line.contains(" panicked at ") {
            self.in_panic = true;
        } else if let Some(reason) = line.strip_prefix("SKIPPED: ") {
            self.skipped.push((self.current.clone(), reason.to_owned()));
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            self.current.clear();
            self.passed += count_before(counts, " passed");
            self.failed += count_before(counts, " failed");
            self.ignored += count_before(counts, " ignored");
        }
    }

    /// Keeps the verdict on a test: `ok`, `FAILED` or `ignored, REASON`, the first two with a time such as ` <0.123s>`.
    fn note_verdict(&mut self, test: &str, verdict: &str) {
        let (word, time) = verdict.split_once(" <").unwrap_or((verdict, ""));
        if word == "FAILED" {
            self.failures.push((test.to_owned(), String::new()));
        }
        let seconds = time.strip_suffix("s>").and_then(|seconds| seconds.parse().ok());
        if let Some(time) = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
            self.times.push((test.to_owned(), time));
        }
    }

    /// Keeps the message of a panic in the output of a failed test. The first one of a test is its cause.
    fn note_panic(&mut self, message: &str) {
        let mut failures = self.failures.iter_mut().rev();
        if let Some((_, first)) = failures.find(|(test, _)| *test == self.current)
            && first.is_empty()
        {
            message.clone_into(first);
        }
    }

    /// Adds the results of another command.
    pub fn add(&mut self, other: TestRun) {
        self.success &= other.success;
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.skipped.extend(other.skipped);
        self.failures.extend(other.failures);
        self.times.extend(other.times);
    }
}

/// Returns the number before `label`, or 0 if there is none.
fn count_before(text: &str, label: &str) -> u64 {
    let Some(end) = text.find(label) else {
        return 0;
    };
    let digits = text[..end].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or("");
    digits.parse().unwrap_or(0)
}

/// Returns `text` without escape sequences for colours (`ESC [ ... letter`).
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            chars.find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> TestRun {
        let mut run = TestRun::default();
        text.lines().for_each(|line| run.parse_line(line));
        run
    }

    #[test]
    fn command_inherits_only_the_variables_of_its_starts() {
        let script = r#"echo "${HOME-none} ${PATH:+some} $own""#;
        let command = Cmd::new("sh").args(["-c", script]).env_inherit_only(&["PAT"]);
        let printed = command.env("own", "set").output(Path::new("/")).unwrap();
        assert_eq!(printed, Ok("none some set\n".to_owned()));
    }

    #[test]
    fn counts_are_summed_over_test_programs() {
        let run = read(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out\n\
             test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!((run.passed, run.failed, run.ignored), (16, 2, 1));
    }

    #[test]
    fn skipped_tests_are_named_and_not_counted_as_run() {
        let run = read(
            "---- tcp_over_ipv6 stdout ----\nsome text\nSKIPPED: iperf3 is not installed\n\n\
             ---- other stdout ----\nfine\n\
             test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        let skipped = ("tcp_over_ipv6".to_owned(), "iperf3 is not installed".to_owned());
        assert_eq!(run.skipped, [skipped]);
        assert_eq!(run.ran(), 2);
    }

    #[test]
    fn failed_tests_are_named_with_their_first_panic() {
        let run = read(
            "test fine ... ok\ntest broken ... FAILED\n\nsuccesses:\n\n---- fine stdout ----\n\n\
             thread 'x' (7) panicked at src/a.rs:1:2:\nexpected by the test\n\nfailures:\n\n\
             ---- broken stdout ----\n\nthread 'broken' (9) panicked at src/b.rs:3:4:\n\
             assertion `left == right` failed\n  left: 1\n\
             thread 'broken' (9) panicked at src/c.rs:5:6:\nin a destructor\n\n\
             failures:\n    broken\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\n",
        );
        let failure = ("broken".to_owned(), "assertion `left == right` failed".to_owned());
        assert_eq!(run.failures, [failure]);
    }

    #[test]
    fn program_without_output_is_killed_and_reported() {
        let script = "echo test fine ... ok; sleep 5 & wait";
        let command = Cmd::new("sh").args(["-c", script]);
        let mut output = Vec::new();
        let limit = Duration::from_millis(200);
        let run = command.read_tests_within(Path::new("."), &mut output, limit).unwrap();
        assert!(!run.success);
        assert!(run.failures[0].1.contains("hung"), "{:?}", run.failures);
        assert!(String::from_utf8(output).unwrap().starts_with("test fine ... ok\nno output"));
    }

    #[test]
    fn durations_are_kept_with_names() {
        let run = read("test a::b ... ok <1.250s>\ntest c ... FAILED <0.5s>\ntest d ... ok\n");
        let ms = Duration::from_millis;
        assert_eq!(run.times, [("a::b".to_owned(), ms(1250)), ("c".to_owned(), ms(500))]);
        assert_eq!(run.failures, [("c".to_owned(), String::new())]);
    }

    #[test]
    fn summary_with_colours_is_parsed() {
        let run = read("test result: \u{1b}[32mok\u{1b}[m. 7 passed; 0 failed; 0 ignored\n");
        assert_eq!(run.passed, 7);
    }

    #[test]
    fn printed_command_is_quoted_for_shell() {
        assert_eq!(quote("--cfg loom"), "'--cfg loom'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote("a-b_c=1"), "a-b_c=1");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn test_run_is_read_from_output_of_command() {
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; echo x >&2; exit 3";
        let command = Cmd::new("sh").args(["-c", script]);
        let mut seen = Vec::new();
        let run = command.read_tests(Path::new("."), &mut seen).unwrap();
        assert_eq!((run.success, run.passed), (false, 2));
        assert!(seen.ends_with(b"x\n"));
    }
}
