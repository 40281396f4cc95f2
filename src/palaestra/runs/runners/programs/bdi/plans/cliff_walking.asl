// Walk along the cliff to the goal and never step over its edge.
//
// Knowledge: the cliff is the bottom row between start and goal. An action that can lead there is forbidden from the
// beginning, and in the column of the goal the way is straight down. The rest of the way the skill `walk` learns.

!live.

+!live <- !know_the_cliff; while (.more_episodes) { !walk }.

+!walk <- .begin_episode; !set_mode; while (not over) { !act }; !review.

// No way is shorter than up, along the cliff and down. A policy that is longer is not followed: the skill learns on.
+!set_mode : .score(walk, R) & size(W, _) & R >= -(W + 1) <- .abolish(mode(_)); +mode(follow).
+!set_mode : slippery & has_policy(walk, _) & episode(N) & N mod 5 > 0 <- .abolish(mode(_)); +mode(follow).
+!set_mode : episode(N) & N mod 3 > 0 <- .abolish(mode(_)); +mode(rehearse).
+!set_mode <- .abolish(mode(_)); +mode(explore).

@descend
+!act : at(X, _) & goal(X, _) & not slippery & move(A, 0, 1) <- .do(A); .learn(walk).
@follow_policy
+!act : mode(follow) <- .policy_action(walk, A); .do(A); .learn(walk).
@rehearse
+!act : mode(rehearse) <- .best_action(walk, A); .do(A); .learn(walk).
@explore
+!act <- .rl_action(walk, A); .do(A); .learn(walk).

// A path that worked once works again, unless the ground is slippery: then the skill has to show that it is good enough.
@cache_path
+!review : not slippery & outcome(success) & not mode(follow) <- .cache_policy(walk).
@cache
+!review : mode(rehearse) & outcome(success) & cache_threshold(T) & .confidence(walk, C) & C >= T <- .cache_policy(walk).
@drop_path
+!review : not slippery & mode(follow) & not outcome(success) <- .drop_policy(walk).
@drop
+!review : has_policy(walk, _) & cache_threshold(T) & .confidence(walk, C) & C < T / 2 <- .drop_policy(walk).
@continue
+!review <- true.

+!know_the_cliff <- for (leads_over(S, A)) { .forbid(walk, S, A) }.

leads_over(S, A) :- cliff(X, Y) & move(A, DX, DY) & cell(X - DX, Y - DY, S).
leads_over(S, A) :- slippery & cliff(X, Y) & move(M, DX, DY) & cell(X - DX, Y - DY, S) & beside(M, A).
beside(M, A) :- move(M, DX, DY) & move(A, DY, DX).
beside(M, A) :- move(M, DX, DY) & move(A, -DY, -DX).
cliff(X, Y) :- size(W, H) & Y = H - 1 & .range(W, X) & X > 0 & X < W - 1.
cell(X, Y, S) :- size(W, H) & X >= 0 & Y >= 0 & X < W & Y < H & S = Y * W + X.
