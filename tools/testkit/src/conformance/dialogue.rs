//! Dialogue of the two halves of the suite: values in the store, each written once.
//!
//! A domain writes below its own `/local/domain/ID/data/conformance`, readable by the other:
//!
//! ```text
//! hello                      a number of this run
//! seen                       the other's number, as read
//! LENDER-USER/CASE/LABEL     a step of a case, under the numbers of both
//! LENDER-USER/CASE/over      passed, "failed REASON" or "skipped REASON"
//! LENDER-USER/through        the last result of the other half has been read
//! ```
//!
//! The halves have met when each reads its own number in the other's `seen`. Values of an earlier run
//! therefore have no effect. A waiting half watches the other's directory. It also reads it at intervals,
//! because losing an event is a fault that only a case may report.

use std::fmt::Display;
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};

use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenstore::{ErrorName, NodeAccess, Permission, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::bench::{Stop, Verdict};
use super::outcome::{Outcome, Role, Suite};

/// Interval of reading without an event.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Maximum length of a reason for the other side in characters: values have at most 2048 bytes.
const REASON_MAX: usize = 500;

/// Maximum count of numbers in one value.
const NUMBERS_MAX: usize = 128;

/// Dialogue with the other half of the suite.
pub(super) struct Dialogue {
    /// Store connection of this domain; the cases use it too.
    pub(super) store: StoreClient,
    /// Directories of this domain and of the other.
    pub(super) own: String,
    pub(super) theirs: String,
    session: String,
    case: &'static str,
    previous: Option<&'static str>,
    patience: Duration,
}

impl Dialogue {
    /// Waits for the other half and exchanges numbers with it.
    pub(super) fn meet<P: Platform>(platform: &P, suite: &Suite) -> Verdict<Dialogue> {
        let mut store = platform.store()?;
        store.set_timeout(suite.patience);
        let base = |id: DomId| format!("/local/domain/{id}/data/conformance");
        let (own, theirs) = (base(platform.domid()), base(suite.peer));
        let nonce = nonce(suite.role);
        set_up(&mut store, platform.domid(), suite.peer, &own)?;
        store.write(&format!("{own}/hello"), &nonce)?;
        store.watch(&theirs, "conformance")?;
        let mut talk = Dialogue {
            store,
            own,
            theirs,
            session: String::new(),
            case: "",
            previous: None,
            patience: suite.patience,
        };
        let peers = talk.await_recognition(&nonce)?;
        talk.session = match suite.role {
            Role::Lender => format!("{nonce}-{peers}"),
            Role::User => format!("{peers}-{nonce}"),
        };
        Ok(talk)
    }

    /// Acknowledges the other's number until the other acknowledges this one. Returns the other's number.
    fn await_recognition(&mut self, nonce: &str) -> Verdict<String> {
        let (hello, seen) = (format!("{}/hello", self.theirs), format!("{}/seen", self.theirs));
        let told = format!("{}/seen", self.own);
        let mut last = None;
        let deadline = Instant::now() + self.patience;
        loop {
            let recognised = look(&mut self.store, &seen)?.is_some_and(|seen| seen == nonce);
            let peers = look(&mut self.store, &hello)?;
            if let Some(peers) = &peers
                && last.as_ref() != Some(peers)
            {
                self.store.write(&told, peers)?;
                last = Some(peers.clone());
            }
            match last.take() {
                Some(peers) if recognised => return Ok(peers),
                waiting => last = waiting,
            }
            self.pause(deadline, "the other half did not show up")?;
        }
    }

    /// Begins a case under its name.
    pub(super) fn begin(&mut self, case: &'static str) {
        let finished = std::mem::replace(&mut self.case, case);
        if let Some(before) = self.previous.replace(finished).filter(|name| !name.is_empty()) {
            // The other half has ended the case after it, so it does not need the value. A failure leaves a
            // few nodes in the store.
            let _ = self.store.rm(&format!("{}/{}/{before}", self.own, self.session));
        }
    }

    /// Publishes a value for the other half, once for each case and label.
    pub(super) fn say(&mut self, label: &str, value: impl Display) -> Verdict {
        let path = format!("{}/{}/{}/{label}", self.own, self.session, self.case);
        Ok(self.store.write(&path, value.to_string())?)
    }

    /// Waits for a value of the other half. Stops if the other half ends the case instead.
    pub(super) fn hear(&mut self, label: &str) -> Verdict<String> {
        let path = format!("{}/{}/{}/{label}", self.theirs, self.session, self.case);
        let over = format!("{}/{}/{}/over", self.theirs, self.session, self.case);
        let deadline = Instant::now() + self.patience;
        loop {
            // In this order: a value published before the end of the case counts.
            let ended = look(&mut self.store, &over)?;
            if let Some(value) = look(&mut self.store, &path)? {
                return Ok(value);
            }
            if let Some(ended) = ended {
                return Err(stop_from(&ended).unwrap_or_else(|| {
                    Stop::Failed(format!("the other half ended without saying \"{label}\""))
                }));
            }
            self.pause(deadline, &format!("the other half did not say \"{label}\""))?;
        }
    }

    /// Waits for a number, as [`hear`](Self::hear) waits for a text.
    pub(super) fn hear_number<T: FromStr>(&mut self, label: &str) -> Verdict<T> {
        let text = self.hear(label)?;
        text.parse().map_err(|_| Stop::Failed(format!("\"{label}\" is {text:?}, no number")))
    }

    /// Waits until the other's value under `label` begins with the number `round`, and returns the rest.
    /// One label serves many rounds, if no half is two rounds ahead.
    pub(super) fn hear_from(&mut self, label: &str, round: usize) -> Verdict<String> {
        let deadline = Instant::now() + self.patience;
        loop {
            let text = self.hear(label)?;
            match text.split_once(' ') {
                Some((number, rest)) if number.parse() == Ok(round) => return Ok(rest.to_owned()),
                _ => self.pause(deadline, &format!("\"{label}\" did not reach {round}"))?,
            }
        }
    }

    /// Publishes many numbers, in several values.
    pub(super) fn say_numbers(&mut self, label: &str, numbers: &[u32]) -> Verdict {
        for (part, numbers) in numbers.chunks(NUMBERS_MAX).enumerate() {
            let text: Vec<String> = numbers.iter().map(u32::to_string).collect();
            self.say(&format!("{label}-{part}"), text.join(" "))?;
        }
        self.say(label, numbers.len())
    }

    /// Waits for many numbers of the other half.
    pub(super) fn hear_numbers(&mut self, label: &str) -> Verdict<Vec<u32>> {
        let count: usize = self.hear_number(label)?;
        let mut numbers = Vec::new();
        for part in 0..count.div_ceil(NUMBERS_MAX) {
            let text = self.hear(&format!("{label}-{part}"))?;
            for word in text.split_ascii_whitespace() {
                let number = word.parse();
                numbers.push(number.map_err(|_| Stop::Failed(format!("{word:?} is no number")))?);
            }
        }
        if numbers.len() == count {
            return Ok(numbers);
        }
        Err(Stop::Failed(format!("{} numbers were said, {count} announced", numbers.len())))
    }

    /// Announces that this half has reached a step, and waits for the other half.
    pub(super) fn both_at(&mut self, label: &str) -> Verdict {
        self.say(label, "here")?;
        self.hear(label).map(drop)
    }

    /// Ends the case: publishes the result, and returns the other half's. Returns `Err` if the other half
    /// does not respond.
    pub(super) fn agree(&mut self, own: Verdict) -> Result<Outcome, Silence> {
        let text = match &own {
            Ok(()) => "passed".to_owned(),
            Err(Stop::Failed(why)) => format!("failed {}", short(why)),
            Err(Stop::Skipped(why)) => format!("skipped {}", short(why)),
        };
        let told = self.say("over", text);
        let theirs = told.and_then(|()| self.await_over()).map_err(|stop| Silence {
            why: stop.into_outcome(),
            own: own.clone().map_or_else(Stop::into_outcome, |()| Outcome::Passed),
        })?;
        Ok(match (own, stop_from(&theirs)) {
            (Err(Stop::Failed(why)), _) => Outcome::Failed(why),
            (_, Some(Stop::Failed(why))) => Outcome::Failed(format!("the other half: {why}")),
            (Err(Stop::Skipped(why)), _) | (_, Some(Stop::Skipped(why))) => Outcome::Skipped(why),
            (Ok(()), None) => Outcome::Passed,
        })
    }

    /// Waits for the other half's result of the case. The other half may still wait for a value.
    fn await_over(&mut self) -> Verdict<String> {
        let over = format!("{}/{}/{}/over", self.theirs, self.session, self.case);
        let deadline = Instant::now() + 2 * self.patience;
        loop {
            if let Some(ended) = look(&mut self.store, &over)? {
                return Ok(ended);
            }
            self.pause(deadline, "the other half did not end the case")?;
        }
    }

    /// Ends the dialogue: waits until the other half has read the last result, or is gone itself. A domain that ends takes
    /// its values out of the store, and the other half would wait for them in vain.
    pub(super) fn end(&mut self) -> Verdict {
        let through = |base: &str| format!("{base}/{}/through", self.session);
        let (own, theirs) = (through(&self.own), through(&self.theirs));
        let hello = format!("{}/hello", self.theirs);
        self.store.write(&own, "yes")?;
        let deadline = Instant::now() + self.patience;
        while look(&mut self.store, &hello)?.is_some() && look(&mut self.store, &theirs)?.is_none()
        {
            self.pause(deadline, "the other half did not read the last result")?;
        }
        Ok(())
    }

    fn pause(&mut self, deadline: Instant, late: &str) -> Verdict {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Stop::Failed(format!("{late} within {:?}", self.patience)));
        }
        self.store.wait_event(left.min(LOOK_AGAIN))?;
        Ok(())
    }
}

/// Returns the error for a half that does not respond.
#[derive(Debug, thiserror::Error)]
#[error("{why:?}; here the case ended as {own:?}")]
pub(super) struct Silence {
    why: Outcome,
    own: Outcome,
}

/// Recreates this domain's directory, readable by `peer`.
fn set_up(store: &mut StoreClient, domain: DomId, peer: DomId, own: &str) -> Verdict {
    let made = store.rm(own).and_then(|()| store.mkdir(own));
    made.map_err(|error| {
        Stop::Failed(format!(
            "{error}; /local/domain/{domain}/data has to be there and belong to {domain}"
        ))
    })?;
    let entry = |access, domain| Permission { access, domain };
    let list = [entry(NodeAccess::None, domain), entry(NodeAccess::Read, peer)];
    let list = PermissionList::new(&list).map_err(Stop::failed)?;
    Ok(store.set_perms(own, &list)?)
}

/// Reads a value; `None` if it does not exist or is not readable yet.
fn look(store: &mut StoreClient, path: &str) -> Result<Option<String>, StoreError> {
    match store.read_text_opt(path) {
        Err(error) if error.refusal() == Some(ErrorName::Access) => Ok(None),
        outcome => outcome,
    }
}

fn short(reason: &str) -> String {
    reason.chars().take(REASON_MAX).collect()
}

fn stop_from(over: &str) -> Option<Stop> {
    match over.split_once(' ') {
        Some(("failed", why)) => Some(Stop::failed(why)),
        Some(("skipped", why)) => Some(Stop::skipped(why)),
        _ => None,
    }
}

/// Returns a number that is unique to this run with high probability.
fn nonce(role: Role) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = now.map_or(0, |since| since.as_nanos());
    format!("{role}{}x{nanos:x}", std::process::id())
}
