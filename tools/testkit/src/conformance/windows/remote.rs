//! Window cases between two domains: the lender runs the suite, and the user accesses pages as it is asked to.
//!
//! ```text
//!  lender                               store                     user
//!  names    two windows                 ------------------------> opens both
//!  ask      ROUND read GREF             ------------------------>
//!           ROUND write GREF TAG                                  accesses the first window
//!           ROUND reopen HANDLE COUNT                             closes it, opens another
//!           ROUND end
//!           <----------------------------------------------------  answer  ROUND RESULT
//! ```

use ringfence_platform::{
    Access, Gref, Platform, RevokeError, TranslationTable, WindowError, WindowHandle, WindowName,
};

use super::super::bench::{Stop, Verdict};
use super::super::dialogue::Dialogue;
use super::super::outcome::{CaseReport, Outcome, Role, Suite, Summary};
use super::{LEAST, WindowPeer, WindowProgram, WindowSuite, issue, put};

/// Maximum number of entries of a window that the user opens.
const ENTRIES_MAX: u32 = 4096;

impl From<WindowError> for Stop {
    fn from(error: WindowError) -> Stop {
        Stop::failed(error)
    }
}

impl Suite {
    /// Runs this half of the window cases, and calls `report` after each. The user reports only one case: that
    /// the lender reached the end.
    pub fn run_windows<P: Platform>(
        &self,
        platform: &P,
        report: &mut dyn FnMut(CaseReport),
    ) -> Summary {
        let mut summary = Summary::default();
        let (name, verdict) = match self.role {
            Role::Lender => {
                ("a_renewed_window_is_opened_again", lend(self, platform, &mut summary, report))
            }
            Role::User => ("the_lender_reaches_the_end", serve(self, platform)),
        };
        let outcome = verdict.map_or_else(Stop::into_outcome, |()| Outcome::Passed);
        summary.count(&outcome);
        report(CaseReport { name, outcome });
        summary
    }
}

/// Formats the name of a window for the user.
fn text_of(table: &dyn TranslationTable) -> String {
    format!("{} {}", table.handle().0, table.shape().references())
}

fn lend<P: Platform>(
    suite: &Suite,
    platform: &P,
    summary: &mut Summary,
    report: &mut dyn FnMut(CaseReport),
) -> Verdict {
    let mut talk = Dialogue::meet(platform, suite)?;
    talk.begin("windows");
    let mut table = platform.window(suite.peer, LEAST)?;
    let mut neighbour = platform.window(suite.peer, LEAST)?;
    talk.say("names", format!("{} {}", text_of(&*table), text_of(&*neighbour)))?;
    talk.hear("opened")?;
    let mut peer = Remote { talk, round: 0 };
    let cases =
        WindowSuite { table: &mut *table, neighbour: &mut *neighbour, peer: &mut peer }.run(report);
    summary.passed += cases.passed;
    summary.failed += cases.failed;
    let renewed = renew(&mut *table, &mut peer);
    peer.ask("end")?;
    peer.talk.end()?;
    renewed
}

/// Has the user close the window, renews it, and reads a page through it again.
fn renew(table: &mut dyn TranslationTable, peer: &mut Remote) -> Verdict {
    let all: Vec<Gref> = table.shape().grefs().collect();
    let back = |error: RevokeError| Stop::Failed(format!("taking everything back: {error}"));
    table.revoke_forced(&all).map_err(back)?;
    table.scrub().map_err(back)?;
    peer.ask("close")?;
    table.renew()?;
    peer.ask(&format!("reopen {}", text_of(table)))?;
    let page = table.shape().pages_for(Access::ReadWrite).next();
    let (Some(page), Some(gref)) = (page, all.first()) else {
        return Err(Stop::failed("the table has no page or no entry"));
    };
    put(table, page, 0x81).map_err(Stop::Failed)?;
    issue(table, *gref, page).map_err(Stop::Failed)?;
    match peer.read(*gref).map_err(Stop::Failed)? {
        Some(0x81) => Ok(()),
        read => Err(Stop::Failed(format!("the peer read {read:x?} after the renewal"))),
    }
}

/// User in another domain, reached by the dialogue.
struct Remote {
    talk: Dialogue,
    round: usize,
}

impl Remote {
    /// Asks the user for an access. Returns its answer.
    fn ask(&mut self, question: &str) -> Verdict<String> {
        self.round += 1;
        self.talk.say("ask", format!("{} {question}", self.round))?;
        self.talk.hear_from("answer", self.round)
    }

    fn ask_access(&mut self, question: &str) -> Result<String, String> {
        self.ask(question).map_err(|stop| format!("{:?}", stop.into_outcome()))
    }
}

impl WindowPeer for Remote {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        let answer = self.ask_access(&format!("read {}", gref.0))?;
        match answer.as_str() {
            "none" => Ok(None),
            tag => tag.parse().map(Some).map_err(|_| format!("the user answered {tag:?}")),
        }
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        self.ask_access(&format!("write {} {tag}", gref.0)).map(drop)
    }
}

fn serve<P: Platform>(suite: &Suite, platform: &P) -> Verdict {
    let mut talk = Dialogue::meet(platform, suite)?;
    talk.begin("windows");
    let names = numbers(&talk.hear("names")?)?;
    let &[handle, count, beside, beside_count] = names.as_slice() else {
        return Err(Stop::failed("the lender did not name two windows"));
    };
    let open = |handle: u64, count: u64| {
        let number = |value: u64| u32::try_from(value).map_err(Stop::failed);
        let references = Some(number(count)?);
        let name = WindowName { handle: WindowHandle(number(handle)?), references };
        let view = platform.open_window(suite.peer, name, ENTRIES_MAX)?;
        Ok::<_, Stop>(WindowProgram(view.taking_over()))
    };
    let mut program = Some(open(handle, count)?);
    let _neighbour = open(beside, beside_count)?;
    talk.say("opened", "both")?;
    for round in 1.. {
        let question = talk.hear_from("ask", round)?;
        let (verb, rest) = question.split_once(' ').unwrap_or((&question, ""));
        let arguments = numbers(rest)?;
        let answer = match (verb, arguments.as_slice(), &mut program) {
            ("read", [gref], Some(program)) => {
                let tag = program.read(gref_of(*gref)?).map_err(Stop::Failed)?;
                tag.map_or_else(|| "none".to_owned(), |tag| tag.to_string())
            }
            ("write", [gref, tag], Some(program)) => {
                program.write(gref_of(*gref)?, *tag).map_err(Stop::Failed)?;
                "tried".to_owned()
            }
            ("close", [], _) => {
                program = None;
                "closed".to_owned()
            }
            ("reopen", [handle, count], _) => {
                program = Some(open(*handle, *count)?);
                "opened".to_owned()
            }
            ("end", [], _) => "over".to_owned(),
            _ => return Err(Stop::Failed(format!("the lender asked {question:?}"))),
        };
        talk.say("answer", format!("{round} {answer}"))?;
        if verb == "end" {
            break;
        }
    }
    talk.end()
}

fn numbers(text: &str) -> Verdict<Vec<u64>> {
    let number =
        |word: &str| word.parse().map_err(|_| Stop::Failed(format!("{word:?} is no number")));
    text.split_ascii_whitespace().map(number).collect()
}

fn gref_of(number: u64) -> Verdict<Gref> {
    u32::try_from(number).map(Gref).map_err(Stop::failed)
}
