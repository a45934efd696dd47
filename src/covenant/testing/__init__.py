"""For the tests of those who write agents: the real engine in memory, with time that the test owns; and deaths at every
point of a run, to show that none of them is noticed. See docs/agents.md."""

from covenant.testing.crash import Report, survives_crashes
from covenant.testing.house import AgentTest
from covenant.testing.script import Answer, Pass, Say, Step, Tell

__all__ = ["AgentTest", "Answer", "Pass", "Report", "Say", "Step", "Tell", "survives_crashes"]
